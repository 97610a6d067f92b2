"""The plots of the bench. Needs matplotlib."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from bench.compared import PACE_MS, STREAMS, Compared, is_ours
from bench.rows import ROWS

# In an environment of its own: no type checker sees it.
mpl: Any = import_module("matplotlib")
pyplot: Any = import_module("matplotlib.pyplot")
mpl.use("Agg")
# Text stays text, and the same figures make the same file.
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "bench", "axes.spines.top": False, "axes.spines.right": False}

_OURS, _THEIRS = "#1f6feb", "#9aa4b2"
_PANELS = {
    "cpu_us_per_token": "server CPU, µs a token",
    "gap_ms_p99": "p99 gap, ms",
    "bytes_per_token": "bytes a token",
}


def draw_paced(compared: Compared, path: Path) -> bool:
    """Draw CPU time, gap and bytes of each row that is streamed; whether there was any to draw."""
    keys = [key for key in ROWS if compared.figures(key, PACE_MS, STREAMS)]
    keys.sort(key=lambda key: compared.cost(key, PACE_MS), reverse=True)
    if not keys:
        return False
    figure, axes = pyplot.subplots(1, len(_PANELS), figsize=(13, 0.4 * len(keys) + 1), sharey=True)
    for axis, (column, title) in zip(axes, _PANELS.items(), strict=True):
        values = [compared.figures(key, PACE_MS, STREAMS)[column] for key in keys]
        colors = [_OURS if is_ours(key) else _THEIRS for key in keys]
        bars = axis.barh([ROWS[key].name for key in keys], values, color=colors)
        axis.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=9)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.2)
    _save(figure, path)
    return True


def draw_turns(turns: list[dict[str, Any]], path: Path) -> None:
    """Draw the cost of a turn over its number."""
    figure, (cpu, size) = pyplot.subplots(1, 2, figsize=(13, 3.6))
    numbers = [turn["turn"] for turn in turns]
    grpc = [turn["grpc_bytes_to_sidecar"] + turn["grpc_bytes_from_sidecar"] for turn in turns]
    cpu.plot(numbers, [turn["sidecar_cpu_ms"] for turn in turns], color=_OURS, label="sidecar")
    cpu.plot(numbers, [turn["bridge_cpu_ms"] for turn in turns], color=_THEIRS, label="bridge")
    size.plot(numbers, grpc, color=_OURS, label="gRPC between bridge and sidecar")
    size.plot(numbers, [turn["http_bytes"] for turn in turns], color=_THEIRS, label="HTTP: the client's whole history")
    cpu.set(xlabel="turn", title="CPU of a turn, ms", ylim=(0, None))
    size.set(xlabel="turn", title="bytes of a turn", yscale="log")
    for axis in (cpu, size):
        axis.title.set_fontsize(10)
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
