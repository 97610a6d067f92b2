"""What `bench.compare`, `turns`, `memory` and `profiling` measured, as tables and plots, written into bench/README.md.

    python -m bench.report [--out out/bench] [--readme bench/README.md]

Needs matplotlib. What stands between the markers `<!-- bench: begin -->` and `<!-- bench: end -->` is replaced, and
the plots go to bench/plots. What was not measured is left out; what failed is said to have.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench import plots
from bench.compared import Compared, asked, comparison
from bench.rows import ROWS
from bench.tables import table

_BEGIN, _END = "<!-- bench: begin -->\n", "<!-- bench: end -->\n"

_LEAST_SHARE = 0.005

Rows = list[dict[str, Any]]


def turns_table(turns: Rows, numbers: list[int]) -> str:
    """Return what the turns of those numbers cost, in Markdown; each the mean of four turns."""
    heads = ["turn", "history, tokens", "sidecar CPU, ms", "bridge CPU, ms", "gRPC bytes", "HTTP bytes"]
    shown = [(str(number), around(turns, number)) for number in numbers if number <= len(turns)]
    rows = [_turn_cells(number, cost) for number, cost in shown]
    if len(shown) > 1:
        (first, before), (last, after) = shown[0], shown[-1]
        ratios = [f"{late / early:.2f}" for early, late in zip(before, after, strict=True)]
        rows.append([f"{last} / {first}", *ratios])
    return table(heads, rows, names=0)


def around(turns: Rows, number: int) -> tuple[float, ...]:
    """Return history, CPU of sidecar and bridge in ms, bytes of gRPC and of HTTP, about a turn."""
    first = max(1, min(number, len(turns) - 3))
    few = [turn for turn in turns if first <= turn["turn"] < first + 4]
    mean = {key: sum(turn[key] for turn in few) / len(few) for key in few[0]}
    grpc = mean["grpc_bytes_to_sidecar"] + mean["grpc_bytes_from_sidecar"]
    return mean["history_tokens"], mean["sidecar_cpu_ms"], mean["bridge_cpu_ms"], grpc, mean["http_bytes"]


def _turn_cells(number: str, cost: tuple[float, ...]) -> list[str]:
    history, sidecar, bridge, grpc, http = cost
    return [number, f"{history:,.0f}", f"{sidecar:.1f}", f"{bridge:.1f}", f"{grpc:,.0f}", f"{http:,.0f}"]


def memory_table(held: dict[str, float]) -> str:
    """Return what the sidecar's memory holds, in Markdown."""
    rows = [
        ("a tape without a call", f"{held['bytes_per_empty_tape']:,.0f}"),
        ("its first call, of one token", f"{held['bytes_per_first_call']:,.0f}"),
        ("a later call, of one token", f"{held['bytes_per_later_call']:,.0f}"),
        ("a token more, with its log-probability", f"{held['bytes_per_token']:.1f}"),
    ]
    return table(["in the sidecar's memory", "bytes"], rows)


def profile_table(profiles: dict[str, dict[str, float]]) -> str:
    """Return where the time of the server goes that each row reads from, in Markdown."""
    areas = dict.fromkeys(area for shares in profiles.values() for area in shares)
    rows = [[area, *(_share(shares.get(area, 0.0)) for shares in profiles.values())] for area in areas]
    shown = [row for row in rows if any(row[1:])]
    return table(["of the time of", *(ROWS[key].name for key in profiles)], shown)


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= _LEAST_SHARE else ""


def about(said: dict[str, Any]) -> str:
    """Say what it was measured on."""
    versions = ", ".join(f"{name} {version}" for name, version in said["versions"].items())
    return f"{said['tokens']} tokens a request; {said['cpus']} cores; {versions}."


def parts(out: Path, drawn: Path) -> list[str]:
    """Return the README's paragraphs, and draw their plots into a directory of that name beside it."""
    compared = Compared.read(out / "results.json")
    paragraphs = [about(compared.about), asked(compared), *comparison(compared)]
    if plots.draw_paced(compared, drawn / "paced.svg"):
        paragraphs.append(f"![CPU time, gaps and bytes, paced]({drawn.name}/paced.svg)")
    if (turns_file := out / "turns.json").exists():
        conversed = json.loads(turns_file.read_text())
        plots.draw_turns(conversed["turns"], drawn / "turns.svg")
        paragraphs += [f"A turn of a conversation, the mean of {conversed['conversations']}:"]
        paragraphs += [
            turns_table(conversed["turns"], conversed["shown_turns"]),
            f"![Cost of a turn]({drawn.name}/turns.svg)",
        ]
    if (memory_file := out / "memory.json").exists():
        paragraphs.append(memory_table(json.loads(memory_file.read_text())))
    if (profile_file := out / "profile.json").exists():
        paragraphs.append(profile_table(json.loads(profile_file.read_text())))
    return paragraphs


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
    write(options.readme, "\n\n".join(parts(options.out, options.readme.parent / "plots")))


if __name__ == "__main__":
    main()
