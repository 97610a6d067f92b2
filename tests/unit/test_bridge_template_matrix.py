"""Which conversations continue as one sample, by model family: `docs/template-matrix.md`, computed and compared.

`TOKENTAPE_WRITE_DOCS=1` writes the file anew.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.talk import Json, Said, Talk
from support.tokenizers import KINDS, LoadChatModel
from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.errors import ApiError
from tokentape_sidecar.engine import FinishReason

TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "ls",
            "description": "List a directory.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
USER: Json = {"role": "user", "content": "What is in a?"}
MORE: Json = {"role": "user", "content": "And in b?"}


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a family writes what it says, after its generation prompt."""

    call: str = '<tool_call>\n{"name": "ls", "arguments": {"path": "a"}}\n</tool_call>'
    answer: str = "Two files."
    reasoned_call: str = ""
    reasoned_answer: str = ""
    end: str = "<|im_end|>"
    call_end: str = ""


_HERMES_CALL = Spelling().call
_THINK = "<think>\nLet me see.\n</think>\n\n"
_ANALYSIS = "Let me see.<|end|><|start|>assistant<|channel|>"
_HARMONY_CALL = 'commentary to=functions.ls <|constrain|>json<|message|>{"path": "a"}'


def hermes(end: str) -> Spelling:
    return Spelling(reasoned_call=_THINK + _HERMES_CALL, reasoned_answer=_THINK + "Two files.", end=end)


SPELLINGS = {
    "qwen3": hermes("<|im_end|>"),
    "llama3_1": hermes("<|eot_id|>"),
    "deepseek_v3": hermes("<｜end▁of▁sentence｜>"),  # noqa: RUF001
    "gemma3": hermes("<end_of_turn>"),
    "smollm2": hermes("<|im_end|>"),
    "gptoss": Spelling(
        call="<|end|><|start|>assistant<|channel|>" + _HARMONY_CALL,
        answer="<|end|><|start|>assistant<|channel|>final<|message|>Two files.",
        reasoned_call=_ANALYSIS + _HARMONY_CALL,
        reasoned_answer=_ANALYSIS + "final<|message|>Two files.",
        end="<|return|>",
        call_end="<|call|>",
    ),
}


def encoded(chat: ChatModel, text: str) -> list[int]:
    return chat.tokenizer.encode(text, add_special_tokens=False)


def result(said: Said, content: str = "x.py y.py") -> Json:
    return {"role": "tool", "tool_call_id": said.echo["tool_calls"][0]["id"], "content": content}


async def three_tool_turns(talk: Talk, spelling: Spelling) -> list[Said]:
    call = encoded(talk.chat, spelling.call + (spelling.call_end or spelling.end))
    first = await talk.ask([USER], call, tools=TOOLS)
    messages = [USER, first.echo, result(first)]
    second = await talk.ask(messages, call, tools=TOOLS)
    messages += [second.echo, result(second, "z.py")]
    third = await talk.ask(messages, encoded(talk.chat, spelling.answer + spelling.end), tools=TOOLS)
    return [first, second, third]


async def two_user_turns(talk: Talk, spelling: Spelling) -> list[Said]:
    answer = encoded(talk.chat, spelling.answer + spelling.end)
    first = await talk.ask([USER], answer)
    return [first, await talk.ask([USER, first.echo, MORE], answer)]


async def cut_by_length(talk: Talk, spelling: Spelling) -> list[Said]:
    answer = encoded(talk.chat, spelling.answer + spelling.end)
    first = await talk.ask([USER], answer[:-2], reason=FinishReason.LENGTH)
    return [first, await talk.ask([USER, first.echo, MORE], answer)]


async def reasoning_then_tool(talk: Talk, spelling: Spelling) -> list[Said]:
    call = encoded(talk.chat, spelling.reasoned_call + (spelling.call_end or spelling.end))
    first = await talk.ask([USER], call, tools=TOOLS)
    messages = [USER, first.echo, result(first)]
    return [first, await talk.ask(messages, encoded(talk.chat, spelling.answer + spelling.end), tools=TOOLS)]


async def reasoning_then_user(talk: Talk, spelling: Spelling) -> list[Said]:
    answer = encoded(talk.chat, spelling.reasoned_answer + spelling.end)
    first = await talk.ask([USER], answer)
    return [first, await talk.ask([USER, first.echo, MORE], answer)]


async def edited_history(talk: Talk, spelling: Spelling) -> list[Said]:
    answer = encoded(talk.chat, spelling.answer + spelling.end)
    first = await talk.ask([USER], answer)
    return [first, await talk.ask([USER, first.echo | {"content": "Three files."}, MORE], answer)]


Scenario = Callable[[Talk, Spelling], Awaitable[list[Said]]]

COLUMNS: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "user turns": (two_user_turns, {}),
    "three tool turns": (three_tool_turns, {}),
    "answer cut by length": (cut_by_length, {}),
    "reasoning, then a tool": (reasoning_then_tool, {}),
    "reasoning, then the user": (reasoning_then_user, {}),
    "the same, `keep_reasoning`": (reasoning_then_user, {"keep_reasoning": True}),
    "edited history": (edited_history, {}),
}


async def cell(chat: ChatModel, spelling: Spelling, scenario: Scenario, policy: dict[str, Any]) -> str:
    """Run one conversation; each of its calls but the first must continue the one before, or say why not."""
    try:
        calls = await scenario(Talk(chat, **policy), spelling)
    except ApiError as refusal:
        return f"refused ({refusal.code})"
    same = True
    for before, call in itertools.pairwise(calls):
        full = chat.render(call.conversation)
        if call.prompt.parent is None:
            assert call.engine_prompt == full
            return f"split ({call.cause})"
        assert call.prompt.parent.call_id == before.call_id
        assert call.engine_prompt == before.whole + call.prompt.token_ids
        assert call.prompt.whole == call.engine_prompt
        # What follows the completion is what the template would write there, token by token.
        assert full[-len(call.prompt.token_ids) :] == call.prompt.token_ids or chat.family is not None
        as_text = [chat.decode(ids, skip_special_tokens=False) for ids in (call.engine_prompt, full)]
        if as_text[0] == as_text[1]:
            assert call.engine_prompt == full
        same = same and call.engine_prompt == full
    return "extended" if same else "extended †"


HEADER = """\
# Which conversations continue as one sample

What becomes of the second and later calls of a conversation, by model family and its chat template, as computed by
`tests/unit/test_bridge_template_matrix.py` with real tokenizers (`TOKENTAPE_WRITE_DOCS=1` writes this file).

- **extended**: the call continues the one before it, and its prompt is id for id what the template renders for the
  whole conversation, since the model spelled its answers as the template does.
- **extended †**: it continues the one before it; the template would spell the history otherwise. What the model sampled
  is kept, and what follows is what the template writes there.
- **split (cause)**: the whole conversation is rendered anew, and a new sample begins. `bridge/README.md` lists the
  causes.
- **refused (code)**: the chat template cannot render the conversation at all, continued or not.

"""
FOOTER = """
Of these templates, those of Llama 3.1, SmolLM2 and Gemma 3 (npm's and GGUF's) ignore tools and write no tool calls, and
DeepSeek V3's writes a call only beside content that is null; the others are as their makers published them. Gemma 3's
raises on the role `tool`. Answers are written in the Hermes form (`<think>`, `<tool_call>`), gpt-oss's in its own;
gpt-oss has no template here and is rendered, read and bridged by `--renderer gpt-oss`. A template that does not know of
reasoning leaves it out, so that such a conversation splits; `--reasoning-parser none` keeps `<think>` in the content.
"""


@pytest.mark.timeout(120)
async def test_the_matrix_in_the_docs_is_what_the_code_does(chat_model: LoadChatModel, checkout: Path) -> None:
    rows = [["", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    for name, kind in KINDS.items():
        chat = chat_model(name)
        cells = [await cell(chat, SPELLINGS[name], scenario, policy) for scenario, policy in COLUMNS.values()]
        rows.append([kind.title, *cells])
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    file = checkout / "docs" / "template-matrix.md"
    if os.environ.get("TOKENTAPE_WRITE_DOCS"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(HEADER + table + FOOTER)
    assert file.read_text() == HEADER + table + FOOTER
