"""What options take, and how they refuse the rest."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from tokentape.option_types import count, positive_count, positive_seconds, seconds


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (count, "0", 0),
        (count, "12", 12),
        (positive_count, "1", 1),
        (seconds, "0", 0.0),
        (seconds, "1.5", 1.5),
        (positive_seconds, "1e-3", 0.001),
    ],
)
def test_what_is_taken(read: Callable[[str], float], text: str, value: float) -> None:
    assert read(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1_000", "\u0663"])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a whole number, 0 or more$"):
        count(text)
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a whole number above 0$"):
        positive_count(text)


@pytest.mark.parametrize("text", ["", "x", "-1", "nan", "inf"])
def test_what_is_no_number_of_seconds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a number of seconds$"):
        seconds(text)
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a number of seconds above 0$"):
        positive_seconds(text)


def test_zero_is_not_positive() -> None:
    for read in (positive_count, positive_seconds):
        with pytest.raises(argparse.ArgumentTypeError, match=r"above 0$"):
            read("0")
