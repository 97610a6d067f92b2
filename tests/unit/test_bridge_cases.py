"""Cases from the field about messages, over every template that takes tools."""

from __future__ import annotations

import pytest

from support.agent import TOOLS, user
from support.talk import Json, Talk
from support.tokenizers import KINDS, LoadChatModel

QUESTION = user("What is in a?")
CALL = '<tool_call>\n{"name": "ls", "arguments": {"p": "a"}}\n</tool_call>'


def result(content: str) -> Json:
    return {"role": "tool", "tool_call_id": "c0", "content": content}


@pytest.mark.parametrize("kind", ["qwen3", "smollm2", "llama3_1", "deepseek_v3"])
async def test_content_null_missing_or_empty_beside_calls_B03(chat_model: LoadChatModel, kind: str) -> None:
    chat = chat_model(kind)
    call = {"id": "c0", "type": "function", "function": {"name": "ls", "arguments": '{"p": "a"}'}}
    prompts = [
        (await Talk(chat).ask([QUESTION, {"role": "assistant", "tool_calls": [call], **content}, result("x")], []))
        for content in ({"content": None}, {"content": ""}, {})
    ]
    assert prompts[0].engine_prompt == prompts[1].engine_prompt == prompts[2].engine_prompt
    text = chat.decode(prompts[0].engine_prompt, skip_special_tokens=False)
    assert "None" not in text
    assert "null" not in text


@pytest.mark.parametrize("kind", ["qwen3", "smollm2", "llama3_1", "deepseek_v3"])
async def test_parts_are_their_text_in_any_role_B04(chat_model: LoadChatModel, kind: str) -> None:
    talk = Talk(chat_model(kind))
    end = KINDS[kind].stop_token_ids[0]
    one = await talk.ask(
        [QUESTION], [*talk.chat.tokenizer.encode(f"22C sunny\n{CALL}", add_special_tokens=False), end], tools=TOOLS
    )
    prompts: list[list[int]] = []
    for parts in ("22C sunny", [{"type": "text", "text": "22C"}, {"type": "text", "text": " sunny"}]):
        two = await talk.ask(
            [*one.messages, one.echo | {"content": parts}, {**result("x"), "content": parts}], [], tools=TOOLS
        )
        prompts.append(two.engine_prompt)
        assert two.engine_prompt[: len(one.whole)] == one.whole
    assert prompts[0] == prompts[1]
