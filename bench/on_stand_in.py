"""What measures a sidecar on the stand-in for vLLM's core: its command line, the sidecar, and where figures go."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from bench.servers import Server, end_by_signals, sidecar_by

from tokentape.v1 import tape_pb2, tape_pb2_grpc

_PUSHING = (sys.executable, "-m", "bench.pushing", "sidecar")
_ENGINE = ("--max-model-len", "8192", "--dtype", "bfloat16", "--max-num-seqs", "1024")


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a command line with what all have; `python -m bench.NAME` reads it."""
    made = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", type=Path, default=Path(".cache/SmolLM2-135M-Instruct"))
    made.add_argument("--out", type=Path, default=Path("out/bench"))
    return made


def measure(
    name: str, options: argparse.Namespace, figures_of: Callable[[Server], Coroutine[Any, Any, dict[str, Any]]]
) -> None:
    """Run a sidecar, and write the figures that `figures_of` has of it to OUT/NAME.json."""
    end_by_signals()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    results: Path = options.out / f"{name}.json"
    results.unlink(missing_ok=True)
    with sidecar_by(
        _PUSHING,
        name=f"{name}-sidecar",
        model=options.model,
        out=options.out,
        options=("--max-tapes", "100000"),
        engine=_ENGINE,
    ) as sidecar:
        figures = asyncio.run(figures_of(sidecar))
    results.write_text(json.dumps(figures, indent=1))


async def open_tapes(tapes: tape_pb2_grpc.TapeServiceAsyncStub, count: int) -> list[str]:
    """Open tapes; return their ids."""
    ids = [f"main.{secrets.token_hex(16)}" for _ in range(count)]
    for tape_id in ids:
        await tapes.OpenTape(tape_pb2.OpenTapeRequest(tape_id=tape_id), wait_for_ready=True)
    return ids
