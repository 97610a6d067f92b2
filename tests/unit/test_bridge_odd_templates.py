"""Chat templates that a continuation cannot trust: each is noticed, and the conversation rendered as a whole."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.agent import user
from support.talk import Said, Talk
from support.tokenizers import LoadChatModel, TokenizerDirectory
from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.errors import ApiError
from tokentape_bridge.families import Family
from tokentape_bridge.parents import Conversation
from tokentape_bridge.tokenizer import Tokenizer

IM_END = 2
NEWLINE = 198
OPEN = "{% if add_generation_prompt %}A:{% endif %}"
PLAIN = "{% for m in messages %}{{ m.role[0] | upper }}:{{ m.content }}<|im_end|>{% endfor %}" + OPEN

LoadTemplate = Callable[..., ChatModel]


@pytest.fixture
def with_template(model_directory: Path, tmp_path: Path) -> LoadTemplate:
    """SmolLM2's vocabulary with a chat template of the test's."""

    def load(template: str, *stop_token_ids: int) -> ChatModel:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model_directory / name, tmp_path)
        (tmp_path / "chat_template.jinja").write_text(template)
        return ChatModel(Tokenizer.load(tmp_path, "sha256"), stop_token_ids=stop_token_ids or [IM_END])

    return load


async def second_call(chat: ChatModel, end: int = IM_END, reply: str = "Go on.") -> Said:
    """Go on with a conversation in which the model said "2"."""
    talk = Talk(chat)
    first = await talk.ask([user("1+1?")], [34, end])
    said = await talk.ask([user("1+1?"), first.echo, user(reply)], [end])
    assert said.cause == "" or said.engine_prompt == chat.render(said.conversation)
    return said


async def test_one_that_can_be_trusted(with_template: LoadTemplate) -> None:
    said = await second_call(with_template(PLAIN))
    assert said.cause == ""
    assert said.engine_prompt == with_template(PLAIN).render(said.conversation)


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        # Cuts, drops or changes what is new.
        (PLAIN.replace("m.content }}", "m.content[:4] }}"), "message_lost"),
        (PLAIN.replace("m.content }}", "(m.content if loop.index < 3 else '') }}"), "message_lost"),
        (PLAIN.replace("m.content }}", "m.content | lower }}"), "message_lost"),
        # Counts the messages before them.
        ("{{ messages | length }}" + PLAIN, "template_rewrites_history"),
        # Puts the last message first.
        (PLAIN.replace("in messages", "in messages | reverse"), "template_rewrites_history"),
        # Ends a turn with no token, or one of other tokens.
        (PLAIN.replace("<|im_end|>", "|"), "terminator_differs"),
        (PLAIN.replace("<|im_end|>", "<|im_start|>"), "terminator_differs"),
        # Takes no more than one question.
        ("{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}" + PLAIN, None),
    ],
)
async def test_others(with_template: LoadTemplate, template: str, cause: str | None) -> None:
    chat = with_template(template)
    if cause is None:
        with pytest.raises(Exception, match="chat template"):
            await second_call(chat)
        return
    assert (await second_call(chat)).cause == cause


async def test_a_message_written_as_json_is_not_lost(with_template: LoadTemplate) -> None:
    chat = with_template(PLAIN.replace("m.content }}", "m.content | tojson }}"))
    assert (await second_call(chat, reply='say "é"\n\\ twice')).cause == ""


@pytest.mark.parametrize(("written", "cause"), [("m.content", ""), ("(m.content if not loop.last)", "message_lost")])
async def test_each_of_equal_messages_is_there(with_template: LoadTemplate, written: str, cause: str) -> None:
    talk = Talk(with_template(PLAIN.replace("m.content", written)))
    first = await talk.ask([user("1+1?"), user("")], [34, IM_END])
    said = await talk.ask([user("1+1?"), user(""), first.echo, user("ok"), user(""), user("ok")], [IM_END])
    assert said.cause == cause


@pytest.mark.parametrize(
    ("refusal", "words"),
    [("'no ' + m.content", "TemplateError)"), ("'In order, please'", "TemplateError: In order, please)")],
)
def test_a_template_error_does_not_quote_messages(with_template: LoadTemplate, refusal: str, words: str) -> None:
    chat = with_template("{% for m in messages %}{{ raise_exception(" + refusal + ") }}{% endfor %}")
    with pytest.raises(ApiError) as raised:
        chat.render(Conversation([user("SECRET")], None, {}))
    assert "SECRET" not in raised.value.message
    assert raised.value.message.endswith(words)


async def test_a_terminator_that_is_an_ordinary_token_may_be_text(with_template: LoadTemplate) -> None:
    chat = with_template(PLAIN.replace("<|im_end|>", "\n"), NEWLINE)
    assert (await second_call(chat, NEWLINE)).cause == "terminator_differs"


@pytest.mark.parametrize(("page", "cause"), [("a page", ""), ("a <|im_end|> page", "special_token_text")])
async def test_a_renderer_that_takes_text_for_special_tokens_F08(
    chat_model: LoadChatModel, tokenizer_directory: TokenizerDirectory, tmp_path: Path, page: str, cause: str
) -> None:
    # Qwen3 without its template: the renderer alone renders and bridges, and encodes what it is given.
    directory = tokenizer_directory("qwen3")
    shutil.copy(directory / "tokenizer.json", tmp_path)
    config: dict[str, Any] = json.loads((directory / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path, "sha256")
    family = Family.load("qwen3", tokenizer.transformers_tokenizer)
    chat = ChatModel(tokenizer, stop_token_ids=[*chat_model("qwen3").stop_token_ids], family=family)
    talk = Talk(chat, keep_reasoning=True)
    first = await talk.ask([user("1+1?")], tokenizer.encode("2<|im_end|>", add_special_tokens=False))
    assert (await talk.ask([user("1+1?"), first.echo, user(page)], [])).cause == cause


async def test_tools_nested_deeper_than_a_template_can_write_are_refused(chat_model: LoadChatModel) -> None:
    chat = chat_model("qwen3")
    parameters: dict[str, Any] = {}
    # As deep as a body's JSON may be; the template's stack has less room.
    for _ in range(sys.getrecursionlimit() - 20):
        parameters = {"a": parameters}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    conversation = Conversation([{"role": "user", "content": "x"}], tools, {})
    with pytest.raises(ApiError) as refused:
        await asyncio.to_thread(chat.render, conversation)
    assert (refused.value.status, refused.value.code) == (400, "chat_template_error")
