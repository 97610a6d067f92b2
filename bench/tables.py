"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 1) -> str:
    """Return a table, its figures to the right; the first `names` columns are words."""
    rule = "|" + "---|" * names + "---:|" * (len(heads) - names)
    return "\n".join([line(heads), rule, *map(line, rows)])


def line(cells: Sequence[str]) -> str:
    """Return a line of a table."""
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)
