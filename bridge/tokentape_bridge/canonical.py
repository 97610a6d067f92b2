"""One text for equal JSON values."""

from __future__ import annotations

import json


def canonical(value: object) -> str:
    """Return one text for equal JSON values: 1 and 1.0 are (JavaScript has one kind of number), 1 and true are not."""
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number
