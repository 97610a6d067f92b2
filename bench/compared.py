"""The measurements of `bench.compare`, and their tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.rows import ROWS
from bench.tables import table

STREAMS = 256
"""Concurrent streams of the figures that are given for one number of them."""
PACE_MS = 20
_CPU = "cpu_us_per_token"
_GROUPS = {
    "gRPC, streamed": ("generate-many", "generate", "smg"),
    "SSE": ("bridge-completions", "bridge-chat", "http-completions", "http-chat", "http-tokens"),
    "not streamed": ("bridge-chat-whole", "http-chat-whole", "http-tokens-whole", "smg-whole"),
}
_ASKED = (
    ("paced", PACE_MS, "generate-many", "smg", 1 / 4),
    ("paced", PACE_MS, "generate-many", "http-completions", 1 / 6),
    ("paced", PACE_MS, "generate-many", "http-chat", 1 / 6),
    ("paced", PACE_MS, "generate-many", "http-tokens", 1 / 6),
    ("at once", 0, "bridge-chat-whole", "http-chat-whole", 1 / 2),
)
"""Pace, its milliseconds, our row, a peer's, and the most that ours may cost of theirs."""


def is_ours(key: str) -> bool:
    """Whether a row reads from tokentape."""
    return key.startswith(("generate", "bridge"))


@dataclass(frozen=True)
class Compared:
    """What was measured."""

    about: dict[str, Any]
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Compared:
        """Read what `bench.compare` has written."""
        return cls(**json.loads(path.read_text()))

    def has(self, key: str, pace_ms: int) -> bool:
        """Whether there is anything of a row, a failure included."""
        return any(row["pace_ms"] == pace_ms and _concerns(row, key) for row in self.rows)

    def has_failed(self, key: str, pace_ms: int, streams: int) -> bool:
        """Whether a measurement was tried in vain, or its server did not start."""
        failed = [row for row in self.rows if row["pace_ms"] == pace_ms and "error" in row]
        return any(_concerns(row, key) and row["streams"] in {0, streams} for row in failed)

    def figures(self, key: str, pace_ms: int, streams: int) -> dict[str, Any]:
        """Return a measurement; empty where there is none, or it failed."""
        for row in self.rows:
            if (row["row"], row["pace_ms"], row["streams"]) == (key, pace_ms, streams) and "error" not in row:
                return row
        return {}

    def cost(self, key: str, pace_ms: int, streams: int = STREAMS) -> float:
        """Return µs a token; infinite where there are none."""
        return float(self.figures(key, pace_ms, streams).get(_CPU, "inf"))

    def cost_parts(self, key: str, pace_ms: int) -> str:
        """Return µs a token, and those of each server where they are several."""
        each = self.figures(key, pace_ms, STREAMS).get("cpu_us_per_token_each", [])
        return f" ({' + '.join(map(number, each))})" if len(each) > 1 else ""

    def streams(self) -> list[int]:
        """Return the numbers of concurrent streams, but for the lone one."""
        return sorted({row["streams"] for row in self.rows if row["streams"] > 1})

    def sorted(self, keys: Iterable[str], pace_ms: int) -> list[str]:
        """Return rows that were measured at a pace: ours first, then by cost."""
        measured = [key for key in keys if self.has(key, pace_ms)]
        return sorted(measured, key=lambda key: (not is_ours(key), self.cost(key, pace_ms)))


def _concerns(row: dict[str, Any], key: str) -> bool:
    # Where a server did not start, all that is read from it has failed.
    return row["row"] == key if row["streams"] else row["row"] == ROWS[key].server


def number(value: float | None) -> str:
    """Return a figure for people, empty where there is none."""
    if value is None or value == float("inf"):
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def asked(compared: Compared) -> str:
    """Return the ratios that the bench is there to show."""
    rows: list[list[str]] = []
    for pace, pace_ms, ours, theirs, most in _ASKED:
        ratio = compared.cost(ours, pace_ms) / compared.cost(theirs, pace_ms)
        if 0 < ratio < float("inf"):
            names = f"{ROWS[ours].name}, of {ROWS[theirs].name}"
            rows.append([names, pace, f"1/{1 / ratio:.1f}", f"1/{1 / most:.0f}"])
    return table([f"server CPU a token, {STREAMS} streams", "", "reached", "at most"], rows, names=2)


def comparison(compared: Compared) -> list[str]:
    """Return the two tables with their headings."""
    paced = f"**Paced**: a token every {PACE_MS} ms for each request, whether or not anyone reads."
    at_once = "**At once**: a step follows when the server has taken the one before."
    return [paced, _table(compared, PACE_MS), at_once, _table(compared, 0)]


def _table(compared: Compared, pace_ms: int) -> str:
    streams = compared.streams()
    counts = "/".join(map(str, streams))
    of_pace = f"slowest stream, of the pace<br>{counts}" if pace_ms else f"tokens/s<br>{counts}"
    lone = ["first token alone, ms"] if pace_ms else []
    heads = [
        "",
        *(f"µs/token<br>{count}" for count in streams),
        f"to ours<br>{STREAMS}",
        of_pace,
        *lone,
        f"p99 gap, ms<br>{STREAMS}",
        f"bytes/token<br>{STREAMS}",
    ]
    rows: list[list[str]] = []
    for group, keys in _GROUPS.items():
        shown = compared.sorted(keys, pace_ms)
        if shown:
            rows.append([f"*{group}*", *[""] * (len(heads) - 1)])
        rows += [_cells(compared, key, pace_ms, compared.cost(shown[0], pace_ms)) for key in shown]
    return table(heads, rows)


def _cells(compared: Compared, key: str, pace_ms: int, ours: float) -> list[str]:
    streams = compared.streams()
    at = compared.figures(key, pace_ms, STREAMS)
    gaps = ROWS[key].streamed
    return [
        f"**{ROWS[key].name}**" if is_ours(key) else ROWS[key].name,
        *(_cost(compared, key, pace_ms, count) for count in streams),
        number(compared.cost(key, pace_ms) / ours),
        " / ".join(_speed(compared.figures(key, pace_ms, count), pace_ms) for count in streams),
        *([number(compared.figures(key, pace_ms, 1).get("first_token_ms_p50"))] if pace_ms else []),
        number(at.get("gap_ms_p99")) if gaps else "",
        number(at.get("bytes_per_token")),
    ]


def _cost(compared: Compared, key: str, pace_ms: int, streams: int) -> str:
    if not compared.figures(key, pace_ms, streams):
        return "failed" if compared.has_failed(key, pace_ms, streams) else ""
    parts = compared.cost_parts(key, pace_ms) if streams == STREAMS else ""
    return number(compared.cost(key, pace_ms, streams)) + parts


def _speed(figures: dict[str, Any], pace_ms: int) -> str:
    if not figures:
        return "-"
    if not pace_ms:
        return number(figures["tokens_per_second"])
    return f"{figures['slowest_tokens_per_second'] * pace_ms / 1e3:.0%}"
