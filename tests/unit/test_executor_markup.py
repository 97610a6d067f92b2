"""Prompts that carry a chat template's markup, over real tokenizers' templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.tokenizers import TokenizerDirectory
from tokentape_executor.errors import PromptRefused
from tokentape_executor.markup import ChatMarkup

KINDS = ["smollm2", "qwen3", "llama3_1", "gemma3", "deepseek_v3"]
PLAIN = st.text(max_size=40) | st.sampled_from(
    ["", " hi ", "user\nmodel\n\n", "a<b>c|>", "user", "<filename>", "[INST]"]
)

Json = dict[str, Any]
LoadTokenizer = Callable[[str], Any]


@pytest.fixture(scope="module")
def load(tokenizer_directory: TokenizerDirectory) -> LoadTokenizer:
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

    auto_tokenizer: Any = AutoTokenizer
    loaded: dict[str, Any] = {}

    def find(kind: str) -> Any:
        if kind not in loaded:
            loaded[kind] = auto_tokenizer.from_pretrained(str(tokenizer_directory(kind)))
        return loaded[kind]

    return find


def user(content: str) -> Json:
    return {"role": "user", "content": content}


def system(content: str) -> Json:
    return {"role": "system", "content": content}


def rendered(tokenizer: Any, conversation: list[Json]) -> str:
    """As OpenRLHF's `preprocess_data` does it."""
    return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)


def messages(question: Any) -> list[Json]:
    return [user(question)] if isinstance(question, str) else list(question)


def contents(conversation: list[Json]) -> list[str]:
    """Some templates trim."""
    return [message["content"].strip() for message in conversation]


@pytest.mark.parametrize("kind", KINDS)
def test_one_user_message_comes_back(load: LoadTokenizer, kind: str) -> None:
    tokenizer = load(kind)
    markup = ChatMarkup(tokenizer)

    @given(PLAIN)
    def check(content: str) -> None:
        prompt = rendered(tokenizer, [user(content)])
        got = markup.unwrap(prompt)
        assert isinstance(got, str)
        assert got.strip() == content.strip()
        assert rendered(tokenizer, [user(got)]) == prompt

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_system_message_comes_back_too(load: LoadTokenizer, kind: str) -> None:
    tokenizer = load(kind)
    markup = ChatMarkup(tokenizer)

    @given(PLAIN, PLAIN)
    def check(instruction: str, content: str) -> None:
        # Gemma's template writes a system message into the user's and trims only that: nothing makes the outer space.
        assume(kind != "gemma3" or (instruction[:1].strip() and content.strip()))
        prompt = rendered(tokenizer, [system(instruction), user(content)])
        got = messages(markup.unwrap(prompt))
        assert rendered(tokenizer, got) == prompt
        if kind != "gemma3" and instruction.strip():
            assert contents(got) == [instruction.strip(), content.strip()]

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_without_markup_is_the_question(load: LoadTokenizer, kind: str) -> None:
    markup = ChatMarkup(load(kind))

    @given(PLAIN)
    def check(content: str) -> None:
        assert markup.unwrap(content) == content

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_other_markup_is_refused_and_the_option_named(load: LoadTokenizer, kind: str) -> None:
    tokenizer = load(kind)
    markup = ChatMarkup(tokenizer)
    one = rendered(tokenizer, [user("One?")])
    end = tokenizer.eos_token
    turns = rendered(tokenizer, [user("One?"), {"role": "assistant", "content": "1."}, user("Two?")])
    for prompt in [turns, one + "Sure", "Well. " + one, one + one, f"What is {end}?", rendered(tokenizer, [user(end)])]:
        with pytest.raises(PromptRefused, match=r"--data\.apply_chat_template"):
            markup.unwrap(prompt)


def test_without_a_template_every_special_token_is_markup(load: LoadTokenizer) -> None:
    markup = ChatMarkup(load("gptoss"))
    assert markup.unwrap("One?") == "One?"
    with pytest.raises(PromptRefused):
        markup.unwrap("<|start|>user<|message|>One?<|end|>")


def test_a_system_prompt_of_the_templates_own_is_no_message(load: LoadTokenizer) -> None:
    tokenizer = load("smollm2")
    prompt = rendered(tokenizer, [user("One?")])
    assert "You are a helpful AI assistant" in prompt
    assert ChatMarkup(tokenizer).unwrap(prompt) == "One?"


def test_a_date_in_the_template_may_pass(load: LoadTokenizer) -> None:
    class Dated:
        """A tokenizer whose template writes the day, as Llama 3.2's does."""

        day = "29 Nov"

        def __getattr__(self, name: str) -> Any:
            return getattr(load("smollm2"), name)

        def apply_chat_template(self, conversation: list[Json], **options: Any) -> str:
            return f"<|im_start|>{self.day}" + load("smollm2").apply_chat_template(conversation, **options)

    tokenizer: Any = Dated()
    markup, prompt = ChatMarkup(tokenizer), rendered(tokenizer, [user("One?")])
    tokenizer.day = "30 Nov"
    assert markup.unwrap(prompt) == "One?"


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ([user("One?")], "One?"),
        ([system("Short."), user("One?")], [system("Short."), user("One?")]),
        ([user([{"type": "text", "text": "One?"}])], [user([{"type": "text", "text": "One?"}])]),  # pyright: ignore[reportArgumentType] # content parts
    ],
)
def test_messages_are_taken_as_messages(load: LoadTokenizer, prompt: list[Json], question: Any) -> None:
    assert ChatMarkup(load("qwen3")).unwrap(prompt) == question


@pytest.mark.parametrize("prompt", [None, [], 5, ["One?"], [{"content": "One?"}]])
def test_what_is_no_prompt_is_refused(load: LoadTokenizer, prompt: Any) -> None:
    with pytest.raises(PromptRefused, match="a string or a list of messages"):
        ChatMarkup(load("qwen3")).unwrap(prompt)
