"""Tool choices that are enforced while sampling: the structural tag, and what XGrammar makes of it."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from support.tokenizers import LoadChatModel
from tokentape_bridge.answer_parser import parse_answer
from tokentape_bridge.errors import ApiError
from tokentape_bridge.forced_calls import structural_tag
from tokentape_bridge.sampling import to_sampling_parameters
from tokentape_bridge.schemas import ChatCompletionRequest

LS: dict[str, Any] = {
    "name": "ls",
    "parameters": {
        "type": "object",
        "properties": {"p": {"type": "string", "maxLength": 3}},
        "required": ["p"],
        "additionalProperties": False,
    },
}
NAP: dict[str, Any] = {"name": "nap"}
TOOLS = [{"type": "function", "function": function} for function in (LS, NAP)]
NAMED = {"type": "function", "function": {"name": "ls"}}
LS_CALL = '<tool_call>\n{"name": "ls", "arguments": {"p": "a"}}\n</tool_call>'
NAP_CALL = '<tool_call>\n{"name": "nap", "arguments": {}}\n</tool_call>'


def test_the_tag_says_what_is_allowed() -> None:
    tag = json.loads(structural_tag(TOOLS, "required", parallel=True) or "")
    assert tag["type"] == "structural_tag"
    form = tag["format"]
    assert (form["type"], form["at_least_one"], form["stop_after_first"]) == ("tags_with_separator", True, False)
    assert [each["begin"] for each in form["tags"]] == [
        '<tool_call>\n{"name": "ls", "arguments": ',
        '<tool_call>\n{"name": "nap", "arguments": ',
    ]
    assert [each["content"]["json_schema"] for each in form["tags"]] == [LS["parameters"], {"type": "object"}]
    named = json.loads(structural_tag(TOOLS, NAMED, parallel=False) or "")["format"]
    assert [each["begin"] for each in named["tags"]] == ['<tool_call>\n{"name": "ls", "arguments": ']
    assert named["stop_after_first"] is True


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_nothing_is_enforced_unless_asked(choice: Any) -> None:
    assert structural_tag(TOOLS, choice, parallel=True) is None


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (None, "required"),
        ([], "required"),
        ([{"type": "function"}, {"function": "ls"}, {"function": None}], "required"),
        (TOOLS, {"type": "function", "function": {"name": "rm"}}),
        (TOOLS, {"type": "function", "function": "ls"}),
        (TOOLS, {"type": "function", "name": "ls"}),
        (TOOLS, "sometimes"),
        (TOOLS, ["ls"]),
        (TOOLS, 5),
    ],
)
def test_a_choice_that_cannot_be_is_named(tools: Any, choice: Any) -> None:
    with pytest.raises(ApiError) as caught:
        structural_tag(tools, choice, parallel=True)
    assert caught.value.param == "tool_choice"


def test_it_travels_as_structured_output_and_excludes_another() -> None:
    fields: dict[str, Any] = {"messages": [], "tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False}
    sampling = to_sampling_parameters(ChatCompletionRequest.model_validate(fields))
    assert sampling.structured_output.structural_tag == structural_tag(TOOLS, NAMED, parallel=False)
    both = ChatCompletionRequest.model_validate(fields | {"response_format": {"type": "json_object"}})
    with pytest.raises(ApiError, match="response_format"):
        to_sampling_parameters(both)


@pytest.fixture(scope="module")
def compile_tag(chat_model: LoadChatModel) -> Any:
    # The engine's own grammar library, which has no usable types.
    xgrammar: Any = importlib.import_module("xgrammar")
    tokenizer: Any = chat_model("smollm2").tokenizer.transformers_tokenizer
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=[2]))

    def accepts(tag: str | None, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))
        return matcher.accept_string(text) and matcher.accept_token(2)

    return accepts


@pytest.mark.parametrize(
    ("choice", "parallel", "text", "accepted"),
    [
        ("required", True, LS_CALL, True),
        ("required", True, NAP_CALL, True),
        ("required", True, f"{LS_CALL}\n{NAP_CALL}", True),
        ("required", False, f"{LS_CALL}\n{NAP_CALL}", False),
        ("required", True, "", False),
        ("required", True, "I would rather talk.", False),
        ("required", True, f"Well: {LS_CALL}", False),
        ("required", True, LS_CALL.replace('"p"', '"q"'), False),
        ("required", True, LS_CALL.replace('"a"', '"abcd"'), False),
        ("required", True, LS_CALL.replace("ls", "rm"), False),
        (NAMED, True, LS_CALL, True),
        (NAMED, True, NAP_CALL, False),
    ],
)
def test_the_grammar_lets_exactly_such_calls_through(
    compile_tag: Any, choice: Any, parallel: bool, text: str, accepted: bool
) -> None:
    assert compile_tag(structural_tag(TOOLS, choice, parallel=parallel), text) is accepted
    if accepted:
        answer = parse_answer(text, with_tools=True, reasoning_is_open=False)
        assert len(answer.tool_calls) == text.count("<tool_call>")
        assert answer.content == ""
