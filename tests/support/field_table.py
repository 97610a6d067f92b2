"""The tables of request fields in bridge/README.md, and what their tests see of a field's effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.answering import AnsweringSidecar
from tokentape_sidecar.engine import EngineCall

CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
"""A tool call, as models that the bridge knows write it."""
# transformers looks for the word "content" in it.
TEMPLATE = """{# content #}{{ tools | tojson }}{{ reasoning_effort }}{{ shout }}{{ enable_thinking }}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message | tojson }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template that shows all that it is given."""

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


def cells(table: Mapping[str, Mapping[str, str]]) -> list[Any]:
    """The route, the field and the status of each cell that has one, for `parametrize`."""
    return [
        pytest.param(route, field, status, id=f"{route}-{field}")
        for route, column in table.items()
        for field, status in column.items()
        if status
    ]


def write_showing_tokenizer(directory: Path, model_directory: Path) -> None:
    """Write the model's tokenizer, with `TEMPLATE`."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((model_directory / name).read_bytes())
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def last_call(sidecar: AnsweringSidecar) -> list[EngineCall]:
    """The engine's last call, if it had one, without its id."""
    return [replace(call, call_id="") for call in sidecar.calls[-1:]]
