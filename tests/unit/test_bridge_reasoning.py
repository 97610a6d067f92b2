"""Reasoning of earlier answers: what becomes of it does not hang on whether the client sends it back (Qwen3)."""

from __future__ import annotations

import pytest

from support.agent import TOOLS, user
from support.talk import Json, Said, Talk
from support.tokenizers import LoadChatModel
from tokentape_bridge.chat_model import ChatModel

QUESTION = user("What is in a?")
CALL = '<tool_call>\n{"name": "ls", "arguments": {"p": "a"}}\n</tool_call>'


@pytest.fixture
def qwen3(chat_model: LoadChatModel) -> ChatModel:
    return chat_model("qwen3")


def ended(chat: ChatModel, text: str) -> list[int]:
    return chat.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)


def after(said: Said, *replies: Json) -> list[Json]:
    return [*said.messages, said.echo, *replies]


def result(content: str) -> Json:
    return {"role": "tool", "tool_call_id": "c0", "content": content}


def check_kept(one: Said, two: Said) -> None:
    assert two.cause == ""
    assert two.engine_prompt[: len(one.whole)] == one.whole


async def two_calls(chat: ChatModel, *, echoes: bool) -> tuple[Talk, Said]:
    """Have the model think and call a tool twice; `echoes`: whether the client sends the first reasoning back."""
    talk = Talk(chat)
    one = await talk.ask([QUESTION], ended(chat, f"<think>\nhm\n</think>\n\n{CALL}"), tools=TOOLS)
    history = after(one, result("x"))
    if not echoes:
        del history[1]["reasoning_content"]
    two = await talk.ask(history, ended(chat, f"<think>\nso\n</think>\n\n{CALL}"), tools=TOOLS)
    check_kept(one, two)
    return talk, two


@pytest.mark.parametrize("echoes", [True, False])
async def test_that_earlier_reasoning_is_stripped_does_not_hang_on_its_echo_F05(qwen3: ChatModel, echoes: bool) -> None:
    talk, two = await two_calls(qwen3, echoes=echoes)
    history = after(two, result("y"))
    if not echoes:
        del history[3]["reasoning_content"]
    three = await talk.ask(history, ended(qwen3, "Yes."), tools=TOOLS)
    check_kept(two, three)
    four = await talk.ask(after(three, user("Go on.")), ended(qwen3, "No."), tools=TOOLS)
    assert four.cause == "template_strips_reasoning"
    assert "hm" not in qwen3.decode(four.engine_prompt, skip_special_tokens=False)
    check_kept(four, await talk.ask(after(four, user("Go on.")), ended(qwen3, "No."), tools=TOOLS))


@pytest.mark.parametrize("echoes", [True, False])
@pytest.mark.parametrize("place", [1, 3])
async def test_edited_reasoning_of_any_answer_is_an_edit_F05(qwen3: ChatModel, place: int, echoes: bool) -> None:
    talk, two = await two_calls(qwen3, echoes=echoes)
    history = after(two, result("y"))
    history[place] = {**history[place], "reasoning_content": "another"}
    assert (await talk.ask(history, ended(qwen3, "Yes."), tools=TOOLS)).cause == "history_edited"
    history[place] = {**history[place], "reasoning_content": {1: "hm", 3: "so"}[place] + "\n"}
    check_kept(two, await talk.ask(history, ended(qwen3, "Yes."), tools=TOOLS))
