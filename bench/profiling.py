"""Where the time of a server goes, by a sampling profiler.

    python -m bench.profiling [--rows generate,generate-many,bridge-chat] [--streams 256] [--pace 20]

Servers, engine and clients are those of `bench.compare`. py-spy (from `.cache/bench-tools`, which `make bench` makes)
looks at the server that is read from, 400 times a second, at the thread that has Python's lock. A look counts for the
innermost function on the stack that an area has; gRPC's own code shows as the event loop, which calls it. Writes
OUT/profile.json; what py-spy saw is beside it, stack by stack.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench import compare
from bench.clients import run
from bench.readings import Load
from bench.rows import ROWS
from bench.servers import Server, end_by_signals
from bench.tables import table

_RATE = 400
_ATTACH_SECONDS = 2.0
_REST = "everything else"
_CORE = "the stand-in for the core"

AREAS: dict[str, tuple[str, ...]] = {
    _CORE: ("pushing.py",),
    "vLLM's statistics and metrics": ("vllm/v1/metrics/", "prometheus_client/", "_update_stats_from_"),
    "vLLM's output handler": ("vllm/",),
    "the direct path and the record": (
        "tokentape_sidecar/vllm_engine/",
        "tokentape_sidecar/record.py",
        "tokentape_sidecar/choice_record.py",
        "tokentape_sidecar/weights.py",
        "tokentape_sidecar/call_weights.py",
        "tokentape_sidecar/broadcast.py",
    ),
    "messages of the sidecar": ("tokentape_sidecar/",),
    "the sidecar's stream, read": ("tokentape/",),
    "text of tokens": (
        "tokentape_bridge/text_decoder.py",
        "tokentape_bridge/token_bytes.py",
        "tokentape_bridge/tokenizer.py",
        "tokentape_bridge/verified_delta.py",
        "transformers/",
        "tokenizers/",
    ),
    "answers: parsed, and written as JSON": ("tokentape_bridge/",),
    "HTTP": ("uvicorn/", "starlette/", "fastapi/", "h11/", "httptools/"),
    "gRPC and the event loop": ("grpc/", "asyncio/", "selectors.py", "threading.py", "concurrent/"),
}
"""By what stands in a frame: its function, and its file below the package's directory."""


def by_area(stacks: Iterable[str]) -> dict[str, float]:
    """Return each area's share of what py-spy saw, of which a line is a stack, outermost first, and how often."""
    seen: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        seen[_area(stack.split(";"))] += int(count)
    del seen[_CORE]
    return {area: count / seen.total() for area, count in seen.most_common()}


def _area(stack: list[str]) -> str:
    for frame in reversed(stack):
        for area, parts in AREAS.items():
            if any(part in frame for part in parts):
                return area
    return _REST


@contextmanager
def _watched(py_spy: Path, server: Server, stacks: Path) -> Generator[None]:
    command = [str(py_spy), "record", "--gil", "--rate", str(_RATE), "--format", "raw", "--output", str(stacks)]
    watching = subprocess.Popen([*command, "--pid", str(server.process.pid)], stdout=subprocess.DEVNULL)
    # It looks at the process's memory first.
    time.sleep(_ATTACH_SECONDS)
    try:
        yield
    finally:
        watching.send_signal(signal.SIGINT)
        watching.wait()


def profile(options: argparse.Namespace, key: str) -> dict[str, float]:
    """Return the areas of the server that a row reads from, and their shares; the stand-in's is taken off."""
    row = ROWS[key]
    stacks: Path = options.out / f"profile-{key}.txt"
    with compare.Servers(options, options.pace).start(row.server) as servers:
        load = Load(row.client, servers[0].address, 8, new_tokens=16, model=compare.NAME, site=str(options.smg_site))
        run(load)
        whole = replace(load, streams=options.streams, new_tokens=options.tokens, processes=options.processes)
        with _watched(options.py_spy, servers[0], stacks):
            run(whole)
    return by_area(stacks.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.profiling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    compare.add_servers(parser)
    parser.add_argument(
        "--rows", type=lambda text: text.split(","), default=["generate", "generate-many", "bridge-chat"]
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--pace", type=int, default=20, metavar="MS", help="of a step; 0: at once")
    parser.add_argument("--py-spy", type=Path, default=Path(".cache/bench-tools/bin/py-spy"))
    options = compare.with_places(parser.parse_args())
    end_by_signals()
    profiles = {key: profile(options, key) for key in options.rows}
    (options.out / "profile.json").write_text(json.dumps(profiles, indent=1))
    for key, areas in profiles.items():
        rows = [[area, f"{share:.0%}"] for area, share in areas.items()]
        print(table([ROWS[key].name, "of its time"], rows), end="\n\n")


if __name__ == "__main__":
    main()
