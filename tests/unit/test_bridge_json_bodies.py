"""The fast reading and writing of JSON says what the standard library says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentape_bridge.json_bodies import JsonRequest, JsonResponse

# Whole numbers of any size, floats to their last bit, any text that is Unicode.
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


async def read(body: bytes) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return await JsonRequest({"type": "http", "headers": []}, receive).json()


@given(VALUES)
async def test_a_request_is_read_as_json_loads_reads_it(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value, indent=1)):
        found = await read(text.encode())
        assert found == value
        assert json.dumps(found) == json.dumps(value)  # 1 is not 1.0, nor true


@given(VALUES)
def test_an_answer_says_the_same(value: Any) -> None:
    assert json.dumps(json.loads(bytes(JsonResponse(value).body))) == json.dumps(value)


@pytest.mark.parametrize("text", [r'"\ud800"', "[NaN, -Infinity, 1e999]", '\ufeff{"a": 1}', '{"a": 1, "a": 2}'])
async def test_what_only_the_standard_library_takes_is_taken(text: str) -> None:
    assert repr(await read(text.encode())) == repr(json.loads(text.encode()))


@pytest.mark.parametrize("body", [b"", b"{bad", b"[1,]", b'"\xff"', b"1 2"])
async def test_what_is_no_json_is_refused_in_the_standard_library_s_words(body: bytes) -> None:
    with pytest.raises(ValueError) as expected:  # noqa: PT011 - whatever it is
        json.loads(body)
    with pytest.raises(ValueError) as found:  # noqa: PT011
        await read(body)
    assert str(found.value) == str(expected.value)
