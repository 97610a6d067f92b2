"""The tables of request fields in bridge/README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ROUTES = ("Chat", "Completions", "Tokenize", "Detokenize")


def read_table(checkout: Path, section: str = "Fields", routes: Sequence[str] = ROUTES) -> dict[str, dict[str, str]]:
    """Return for each route the status of each field; empty where the route has no such field."""
    text = (checkout / "bridge" / "README.md").read_text()
    body = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"]
    assert tuple(rows[0][1:-1]) == tuple(routes)
    table: dict[str, dict[str, str]] = {route: {} for route in routes}
    for row in rows[2:]:
        field = row[0].strip("`")
        for route, status in zip(routes, row[1:-1], strict=True):
            assert field not in table[route], f"{field} is in the table twice"
            table[route][field] = status
    return table
