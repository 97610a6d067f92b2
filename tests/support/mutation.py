"""Bugs put into copies of functions, to see who finds them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def mutated(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return a copy of `function` in whose source `new` stands for `old`, which must be there exactly once."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has {old!r} {source.count(old)} times"
    # With this module's `from __future__`, which all of ours have.
    code = compile(source.replace(old, new), f"<a mutated {function.__qualname__}>", "exec")
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    return made[function.__name__]
