"""The table and the plots of `bench.compare` and `bench.turns`, written into bench/README.md.

    python -m bench.report [--out out/bench] [--readme bench/README.md]

Needs matplotlib. What stands between the markers `<!-- bench: begin -->` and `<!-- bench: end -->` is replaced, and
the plots go to bench/plots.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from bench.compare import ROWS
from bench.turns import SHOWN_TURNS

mpl.use("Agg")
from matplotlib import pyplot

_BEGIN, _END = "<!-- bench: begin -->\n", "<!-- bench: end -->\n"
_COLUMNS = {
    "streams": "streams",
    "cpu_us_per_token": "CPU µs/token",
    "tokens_per_second": "tokens/s",
    "first_token_ms_p50": "first token, ms",
    "gap_ms_p99": "p99 gap, ms",
    "bytes_per_token": "bytes/token",
}

Rows = list[dict[str, Any]]


def table(rows: Rows, pace_ms: int) -> str:
    """Return the measurements at one pace in Markdown, in the order of `ROWS`."""
    lines = ["| | " + " | ".join(_COLUMNS.values()) + " |", "|---|" + "---:|" * len(_COLUMNS)]
    for key, row in ROWS.items():
        lines += [
            f"| {row.name} | " + " | ".join(_cell(found, column) for column in _COLUMNS) + " |"
            for found in of(rows, key, pace_ms)
        ]
    return "\n".join(lines)


def of(rows: Rows, key: str, pace_ms: int) -> Rows:
    """Return one row's measurements at one pace, by number of streams."""
    found = [row for row in rows if row["row"] == key and row["pace_ms"] == pace_ms and row["streams"]]
    return sorted(found, key=lambda row: row["streams"])


def _cell(row: dict[str, Any], column: str) -> str:
    if column not in row:
        return "failed" if column == "cpu_us_per_token" else ""
    value = row[column]
    return f"{value:,.0f}" if value >= 100 or column == "streams" else f"{value:.1f}"


def turns_table(turns: Rows) -> str:
    """Return what a turn costs in Markdown; CPU time is the mean of four turns, as the clock is coarse."""
    lines = [
        "| turn | history, tokens | sidecar CPU, ms | bridge CPU, ms | gRPC bytes | HTTP bytes |",
        "|---:" * 6 + "|",
    ]
    for number in SHOWN_TURNS:
        first = min(number, len(turns) - 3)
        around = [turn for turn in turns if first <= turn["turn"] < first + 4]
        if number <= len(turns):
            grpc = _mean(around, "grpc_bytes_to_sidecar") + _mean(around, "grpc_bytes_from_sidecar")
            cells = [_mean(around, "history_tokens"), _mean(around, "sidecar_cpu_ms"), _mean(around, "bridge_cpu_ms")]
            shown = [f"{cells[0]:,.0f}", f"{cells[1]:.1f}", f"{cells[2]:.1f}", f"{grpc:,.0f}"]
            lines.append(f"| {number} | " + " | ".join(shown) + f" | {_mean(around, 'http_bytes'):,.0f} |")
    return "\n".join(lines)


def _mean(rows: Rows, key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def plot_cost(rows: Rows, path: Path) -> None:
    """Draw the CPU time of a token over the number of streams, at each pace."""
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
    for axis, pace_ms in zip(axes, (0, 20), strict=True):
        for key, row in ROWS.items():
            found = [each for each in of(rows, key, pace_ms) if "cpu_us_per_token" in each and each["streams"] > 1]
            if found:
                style = "-o" if key.startswith(("generate", "bridge")) else "--s"
                costs = [each["cpu_us_per_token"] for each in found]
                axis.plot([each["streams"] for each in found], costs, style, label=row.name)
        axis.set(xscale="log", yscale="log", xlabel="streams", title=f"paced, {pace_ms} ms" if pace_ms else "at once")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("server CPU, µs a token")
    axes[0].legend(fontsize=7)
    _save(figure, path)


def plot_turns(turns: Rows, path: Path) -> None:
    """Draw the cost of a turn over the length of its history."""
    figure, (cpu, size) = pyplot.subplots(1, 2, figsize=(12, 4))
    history = [turn["history_tokens"] for turn in turns]
    for key, name in (("sidecar_cpu_ms", "sidecar"), ("bridge_cpu_ms", "bridge")):
        cpu.plot(history, [turn[key] for turn in turns], label=name)
    for key, name in (("grpc_bytes_to_sidecar", "gRPC, to the sidecar"), ("http_bytes", "HTTP, both ways")):
        size.plot(history, [turn[key] for turn in turns], label=name)
    cpu.set(xlabel="history, tokens", ylabel="CPU of a turn, ms")
    size.set(xlabel="history, tokens", ylabel="bytes of a turn", yscale="log")
    for axis in (cpu, size):
        axis.legend()
        axis.grid(alpha=0.3)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def memory(held: dict[str, float]) -> str:
    """Say what tapes take."""
    tape, token = held["bytes_per_tape"] / 1024, held["bytes_per_token"]
    return (
        f"Memory of the sidecar: {tape:.1f} KiB for a tape with one call of one token; {token:.1f} bytes a token more."
    )


def text(compared: dict[str, Any], conversed: dict[str, Any]) -> str:
    """Return the README's part."""
    about = compared["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return "\n\n".join(
        [
            f"Paced at 20 ms a step ({about['tokens']} tokens a request; {about['cpus']} cores; {versions}):",
            table(compared["rows"], 20),
            "At once:",
            table(compared["rows"], 0),
            "![CPU time of a token](plots/cost.png)",
            f"A turn of a conversation, the mean of {conversed['conversations']}:",
            turns_table(conversed["turns"]),
            "![Cost of a turn](plots/turns.png)",
            memory(conversed["memory"]),
        ]
    )


def write(readme: Path, part: str) -> None:
    """Replace what stands between the markers."""
    before, _, rest = readme.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    if not rest or _END not in rest:
        raise SystemExit(f"{readme} has no {_BEGIN.strip()} … {_END.strip()}")
    readme.write_text(f"{before}{_BEGIN}{part}\n{_END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--readme", type=Path, default=Path("bench/README.md"))
    options = parser.parse_args()
    compared = json.loads((options.out / "results.json").read_text())
    conversed = json.loads((options.out / "turns.json").read_text())
    plots = options.readme.parent / "plots"
    plot_cost(compared["rows"], plots / "cost.png")
    plot_turns(conversed["turns"], plots / "turns.png")
    write(options.readme, text(compared, conversed))


if __name__ == "__main__":
    main()
