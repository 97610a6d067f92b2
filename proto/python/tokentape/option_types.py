"""Types of options, for `argparse`: each raises `argparse.ArgumentTypeError` on what it does not take."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """Read a whole number, 0 or more."""
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def positive_count(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def seconds(text: str) -> float:
    """Read a number of seconds, 0 or more."""
    read = _number(text)
    if not 0 <= read < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return read


def positive_seconds(text: str) -> float:
    """Read a number of seconds above 0."""
    read = _number(text)
    if not 0 < read < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return read


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
