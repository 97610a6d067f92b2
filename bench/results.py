"""What loads on servers gave: each with the CPU time that it took, and all of them in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.clients import run
from bench.readings import Load
from bench.servers import Server

_ERROR_CHARACTERS = 600


@dataclass
class Results:
    """What was measured, written after each measurement."""

    path: Path
    about: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        said = {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}
        print(f"[{time.strftime('%H:%M:%S')}] {said}", flush=True)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"about": self.about, "rows": self.rows}, indent=1))


def measured(servers: Sequence[Server], load: Load, *, core_us: float = 0.0) -> dict[str, Any]:
    """Put a load on the first of `servers`; return its figures with the CPU time of all of them, or its error.

    `core_us`: what a stand-in for the engine's core, in the last of them, spends on a token, in µs; it is taken off.
    """
    before = [server.cpu_seconds() for server in servers]
    try:
        readings = run(load)
    except (RuntimeError, TimeoutError) as error:
        return {"error": str(error)[:_ERROR_CHARACTERS]}
    spent = [server.cpu_seconds() - first for server, first in zip(servers, before, strict=True)]
    each = [seconds / readings.tokens * 1e6 for seconds in spent]
    each[-1] -= core_us
    return {"cpu_us_per_token": sum(each), "cpu_us_per_token_each": each, **readings.figures()}
