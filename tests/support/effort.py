"""How hard seeded and fuzzing tests try: with `TOKENTAPE_EFFORT=100` in the environment, a hundred times as hard."""

from __future__ import annotations

import os
from typing import cast

from hypothesis import HealthCheck, settings

_TIMES = int(os.environ.get("TOKENTAPE_EFFORT", "1"))


def times(count: int) -> int:
    """Return `count`, multiplied by the environment's `TOKENTAPE_EFFORT`."""
    return count * _TIMES


def fuzzing(examples: int) -> settings:
    """Try so many examples, the same ones every time, or more and always others where an effort is asked for."""
    return settings(
        max_examples=times(examples),
        derandomize=_TIMES == 1,
        database=None,
        suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
    )
