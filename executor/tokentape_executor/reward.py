"""What an agent gives as its reward, as the number that is trained on."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any, cast

from tokentape_executor.errors import RewardInvalid
from tokentape_executor.rollout import Outcome


def as_reward(value: object) -> float:
    """Return `value` as a reward: a finite number, an array's or tensor's only element, or a list's only number.

    0.0 is a reward like any other. Everything else is none, and never 0: `None`, NaN, infinities, truth values, text,
    lists of several. Raises `RewardInvalid`, naming what came.
    """
    number = _only_element(value)
    # A boolean is an int to Python, and a verifier's mistake.
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise _invalid(value)
    try:
        reward = float(number)
    except OverflowError:
        raise _invalid(value) from None
    if not math.isfinite(reward):
        raise _invalid(value)
    return reward


def as_outcome(result: object) -> Outcome:
    """Return what an agent's `run` returned, a bare reward included, as an outcome with a checked reward."""
    if isinstance(result, Outcome):
        return Outcome(as_reward(result.reward), result.truncated, result.report)
    return Outcome(as_reward(result))


def _only_element(value: object) -> object:
    """Return the one thing in a list or tuple, an array or a tensor; `value` itself where it is none of these."""
    if isinstance(value, list | tuple):
        elements = cast("Sequence[object]", value)
        return _scalar(elements[0]) if len(elements) == 1 else elements
    return _scalar(value)


def _scalar(value: object) -> object:
    """Return a number of numpy's or torch's as one of Python's; what holds several numbers stays what it is."""
    item: Any = getattr(value, "item", None)
    if not callable(item):
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):
        return value


def _invalid(value: object) -> RewardInvalid:
    return RewardInvalid(f"the reward must be one finite number, not {type(value).__name__} {reprlib.repr(value)}")
