"""Reading an answer's text as it comes: however it is cut, the parts join to what the whole says."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.text_cuts import cut, every_cut, places
from tokentape_bridge import answer_parser
from tokentape_bridge.answer_parser import AnswerParser, Content, Part, Reasoning, joined, parse_answer
from tokentape_bridge.tool_calls import ToolCall

CALL = '<tool_call>\n{"name": "ls", "arguments": {"p": "a"}}\n</tool_call>'
TRICKY = (
    '<tool_call>{"name": "sh", "arguments": {"c": "mkdir -p {a,b", "t": "</tool_call> \\"}} <tool_call>"}}</tool_call>'
)
LONG = '<tool_call>{"name": "write", "arguments": {"text": "' + 'x\\n\\"</tool_call>{' * 30 + '"}}</tool_call>'
SURROGATES = '<tool_call>{"name": "\\ud83c\\udf36", "arguments": {"a": -Infinity, "b": 1.5e-3}}</tool_call>'
ANSWERS = [
    f"<think>\nFirst \N{HOT PEPPER},\n\nthen.\n</think>\n\nI look.\n{CALL}\n{TRICKY}",
    f"<think>a</think>{CALL}",
    f"{CALL}\nand\n\n{CALL}\n",
    f"\n\n{CALL}",
    f"\nLook:\n{CALL}\n\n",
    LONG,
    SURROGATES,
    f"<tool_call>\n{{'name': 'ls'}}</tool_call>\n{CALL}",
    f'<tool_call>{{"name": "ls", "arguments": {{"p": "a</tool_call>\n{CALL}',
    "Use the <tool_call> tag and the </tool_call> tag.\n",
    "  \n<think",
    "<think>\n\n</think>\n\n",
    "<think>cut off </thin",
    "a < b <tool",
    "\n",
    "",
]
FLAGS = list(itertools.product([True, False], [True, False], [True, False]))
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool"]
JSON = ['{"name": "ls"', "}", '"', "\\", "\\u12", "1.", "["]
FRAGMENTS = [*ANSWERS[:7], *TAGS, *JSON, "\n", " ", "x", "\u2028"]


def parts_of(pieces: list[str], flags: tuple[bool, bool, bool]) -> list[Part]:
    with_tools, is_open, with_reasoning = flags
    parser = AnswerParser(with_tools=with_tools, reasoning_is_open=is_open, with_reasoning=with_reasoning)
    return [part for piece in pieces for part in parser.push(piece)] + parser.finish()


def check(text: str, pieces: list[str]) -> None:
    for flags in FLAGS:
        with_tools, is_open, with_reasoning = flags
        whole = parse_answer(text, with_tools=with_tools, reasoning_is_open=is_open, with_reasoning=with_reasoning)
        assert joined(parts_of(pieces, flags)) == whole


@pytest.mark.parametrize("short_call", [0, 256])
@pytest.mark.parametrize("text", ANSWERS, ids=range(len(ANSWERS)))
def test_at_every_place_B09(text: str, short_call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_parser, "_SHORT_CALL", short_call)
    for pieces in every_cut(text):
        check(text, pieces)


@settings(deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), places())
@example(f"{CALL}\n", [1])
def test_anywhere_B09(text: str, where: list[int]) -> None:
    check(text, cut(text, where))


def test_calls_arrive_whole_and_in_their_place_B10() -> None:
    parts = parts_of(list(f"Look:\n{CALL}\nand {TRICKY}"), (True, False, True))
    kinds = [kind for kind, _ in itertools.groupby(parts, type)]
    assert kinds == [Content, ToolCall, Content, ToolCall]
    arguments = [json.loads(part.arguments_text) for part in parts if isinstance(part, ToolCall)]
    assert arguments == [{"p": "a"}, {"c": "mkdir -p {a,b", "t": '</tool_call> "}} <tool_call>'}]


def test_text_is_not_held_longer_than_it_is_in_doubt() -> None:
    parser = AnswerParser(with_tools=True, reasoning_is_open=False)
    assert parser.push(" <thi") == []
    assert parser.push("nk>\nhm") == [Reasoning(""), Reasoning("hm")]
    assert parser.push(" so\n") == [Reasoning(" so")]
    assert parser.push("it</") == [Reasoning("\nit")]
    assert parser.push("think>\n") == []
    assert parser.push("\nWell <") == [Content("Well ")]
    assert parser.push("b> <tool_call>") == [Content("<b> ")]
    assert parser.push('{"name') == []
    assert parser.push("': 1") == []
    assert parser.finish() == [Content("<tool_call>"), Content("{\"name': 1")]


@pytest.mark.parametrize("prose", ["the <tool_call> tag", "<tool_call>{'name': 'ls'}, said a model of another family"])
def test_what_cannot_become_a_call_is_given_before_the_end(prose: str) -> None:
    parser = AnswerParser(with_tools=True, reasoning_is_open=False)
    given_soon = [part for character in prose for part in parser.push(character)]
    assert joined(given_soon).content == prose


@pytest.mark.parametrize("text", ["<think>abc", "<think>\nab\n\nc\n"])
def test_reasoning_that_is_cut_off_is_all_reasoning_B11(text: str) -> None:
    for pieces in every_cut(text):
        answer = joined(parts_of(pieces, (True, False, True)))
        assert (answer.reasoning, answer.content) == (text.removeprefix("<think>").strip("\n"), "")
        off = joined(parts_of(pieces, (True, False, False)))
        assert (off.reasoning, off.content) == (None, text)


def test_empty_reasoning_is_told_B11() -> None:
    for pieces in every_cut("<think>\n\n</think>\n\nb"):
        answer = joined(parts_of(pieces, (True, False, True)))
        assert (answer.reasoning, answer.content) == ("", "b")
    assert joined(parts_of([], (True, True, True))).reasoning == ""


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "write", "arguments": {"text": "' + "word \\n" * 30_000,
        '<tool_call>{"name": <tool_call>' * 6000 + "</tool_call>",
        '<tool_call>{"a": "</tool_call>' * 6000,
        "<tool_call>{" * 15_000,
        "\n" * 100_000,
        " " * 100_000,
        "<think>" + "\n" * 100_000,
        "<" * 100_000,
    ],
    ids=["long arguments", "broken calls", "quoted tags", "openings", "line breaks", "space", "reasoning", "angles"],
)
def test_long_and_odd_texts_take_no_more_than_a_moment(text: str) -> None:
    began = time.process_time()
    joined(parts_of(cut(text, range(0, len(text), 4)), (True, False, True)))
    # The square of the length would be minutes.
    assert time.process_time() - began < 20
