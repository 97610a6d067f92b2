"""Random conversations through the continuation, with real tokenizers: what was sampled is never touched.

For each call: its prompt begins with its parent's prompt and completion, whatever tokens spelled that; what follows
says each new message, and no special token in it comes from content. Where a call has no parent, its prompt is what
the template renders.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.talk import Json, Said, Talk
from support.tokenizers import KINDS, LoadChatModel
from tokentape_bridge.chat_model import ChatModel
from tokentape_sidecar.engine import FinishReason

SPECIAL = ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<tool_call>", "</think>"]
WORDS = [
    "ok",
    " ",
    "\n",
    "\r\n",
    "\t",
    "é",
    "e\N{COMBINING ACUTE ACCENT}",
    "日本",
    "\N{HOT PEPPER}",
    "{",
    "}",
    '"',
    "\\",
]
MORE_WORDS = ["international", "QQ", "音乐", "<", ">", "a b", "\N{LOWER ONE EIGHTH BLOCK}", "  ", "0", "<b>", "&amp;"]
texts = st.lists(
    st.sampled_from(WORDS + MORE_WORDS + SPECIAL) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    min_size=1,
    max_size=8,
).map("".join)
spaces = st.sampled_from(["", " ", "\n", "\r\n", "  "])
arguments = st.dictionaries(st.sampled_from("pqr"), texts | st.integers() | st.booleans() | st.none(), max_size=2)
BAR = "[|\N{FULLWIDTH VERTICAL LINE}]"
SPECIAL_TEXT = re.compile(rf"<{BAR}.*{BAR}>|<(bos|eos|pad|unk|start_of_turn|end_of_turn)>")
CAUSES = {"special_token_text", "template_strips_reasoning", "template_rewrites_history"}
"""Why a call of these conversations may begin a sample; none is edited, and all end as the template ends a turn."""
TOOLS: list[Json] = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]


@st.composite
def calls(draw: st.DrawFn) -> str:
    """A tool call in JSON as models write it: valid, with odd whitespace."""
    gaps = [draw(spaces) for _ in range(5)]
    value = json.dumps(draw(arguments), ensure_ascii=draw(st.booleans()))
    return (
        f'<tool_call>\n{{{gaps[0]}"name"{gaps[1]}: "ls"{gaps[2]},{gaps[3]}"arguments": {value}{gaps[4]}}}\n</tool_call>'
    )


turns = st.lists(
    st.tuples(
        texts | calls() | st.builds("{}\n{}".format, texts, calls()), texts, st.booleans(), st.integers(0, 2**32)
    ),
    min_size=1,
    max_size=4,
)


class Speller:
    """Spells text in ids that decode to it, seldom as the tokenizer would: cut at random places, or byte by byte."""

    def __init__(self, chat: ChatModel) -> None:
        self._chat = chat
        spelled = ((chat.tokenizer.token_bytes(i), i) for i in range(1000) if i not in chat.added_token_ids)
        texts = {i: chat.decode([i], skip_special_tokens=False) for i in chat.added_token_ids}
        self.special = frozenset(i for i, text in texts.items() if SPECIAL_TEXT.fullmatch(text))
        """The ids that no content may bring."""
        self._byte_ids = {text[0]: i for text, i in spelled if len(text) == 1}

    def spell(self, text: str, seed: int) -> list[int]:
        source = random.Random(seed)
        ids = [token_id for piece in _pieces(text, source) for token_id in self._piece(piece, source)]
        return [token_id for token_id in ids if token_id not in self._chat.stop_token_ids]

    def _piece(self, piece: str, source: random.Random) -> list[int]:
        ids = [self._byte_ids.get(byte) for byte in piece.encode()]
        if source.random() < 0.3 and None not in ids:
            return [token_id for token_id in ids if token_id is not None]
        return self._chat.tokenizer.encode(piece, add_special_tokens=False)


def _pieces(text: str, source: random.Random) -> Iterator[str]:
    while text:
        length = source.choice([1, 1, 2, 3, 7, 30])
        yield text[:length]
        text = text[length:]


def harmless(value: Any) -> Any:
    """`value` without any text that a tokenizer may take for a special token."""
    return json.loads(json.dumps(value).replace("<", "("))


def check(chat: ChatModel, special: frozenset[int], before: Said | None, said: Said) -> None:
    conversation = said.conversation
    plain = chat.render(replace(conversation, messages=harmless(conversation.messages)))
    expected = [token_id for token_id in plain if token_id in special]
    if said.prompt.parent is None:
        assert said.engine_prompt == chat.render(conversation)
        assert [token_id for token_id in said.engine_prompt if token_id in special] == expected
        assert said.cause in (CAUSES if before else {"new_conversation"})
        return
    assert before is not None
    assert said.prompt.parent.call_id == before.call_id
    delta = said.prompt.token_ids
    assert said.engine_prompt == before.whole + delta
    found = [token_id for token_id in delta if token_id in special]
    assert found
    assert found == expected[-len(found) :]
    text = conversation.messages[-1]["content"].strip()
    # Some tokenizers normalise (Qwen3's: NFC), and SmolLM2's has not all bytes: what they make of the text is there.
    kept = chat.decode(chat.tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False)
    assert kept.strip() in chat.decode(delta, skip_special_tokens=False)


async def converse(chat: ChatModel, speller: Speller, script: list[Any], *, end: int, tools: bool) -> list[str]:
    """Hold a conversation; return why each call but the first was not continued, "" where it was."""
    talk = Talk(chat)
    causes: list[str] = []
    messages: list[Json] = [{"role": "user", "content": script[0][1]}]
    before: Said | None = None
    for text, new, is_cut, seed in script:
        ids = speller.spell(text, seed)
        cut = is_cut and bool(ids)
        said = await talk.ask(
            messages,
            ids if cut else [*ids, end],
            tools=TOOLS if tools else None,
            reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        )
        check(chat, speller.special, before, said)
        before = said
        reply = {"role": "tool", "tool_call_id": "c0"} if said.answer.tool_calls else {"role": "user"}
        messages = [*messages, said.echo, {**reply, "content": new}]
        causes.append(said.cause)
    return causes[1:]


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "deepseek_v3", "gemma3", "smollm2"])
def test_chains_of_turns(chat_model: LoadChatModel, name: str) -> None:
    chat = chat_model(name)
    speller = Speller(chat)
    end = KINDS[name].stop_token_ids[0]
    causes: list[str] = []

    @settings(max_examples=50, deadline=None)
    @given(script=turns)
    def converses(script: list[Any]) -> None:
        # Gemma's template raises on tools.
        causes.extend(asyncio.run(converse(chat, speller, script, end=end, tools=name != "gemma3")))

    converses()
    assert causes.count("") > len(causes) / 3, "hardly a call was continued: this shows nothing"
