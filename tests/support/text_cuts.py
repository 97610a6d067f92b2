"""Ways to cut a sequence into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st


def cut(whole: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Return the pieces of `whole` between `places`, none of them empty."""
    edges = sorted({0, len(whole), *(place for place in places if 0 < place < len(whole))})
    return [whole[start:end] for start, end in itertools.pairwise(edges)]


def every_cut(whole: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield `whole` in two at every place, and in equal pieces of 1, 2, 3 and 7, and in one."""
    for place in range(1, len(whole)):
        yield cut(whole, [place])
    for size in (1, 2, 3, 7, max(1, len(whole))):
        yield cut(whole, range(0, len(whole), size))


def places() -> st.SearchStrategy[list[int]]:
    """Where to cut something of up to some hundred elements."""
    return st.lists(st.integers(0, 300), max_size=12)
