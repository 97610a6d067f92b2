"""Prompts that already carry the chat template's markup, as OpenRLHF's `--data.apply_chat_template` makes them.

Agents speak in messages, and the bridge writes the markup; a prompt that carries it already would get it twice. The
rule, for a prompt that is a string:

1. Markup is the text of the tokens that the tokenizer's chat template writes, and of its beginning-of-sequence and
   end-of-sequence tokens; without a template, of all its special tokens. A prompt without any is taken as it is.
2. One that is exactly what the template makes of one user message, or of a system and a user message, with the
   generation prompt, is unwrapped to those messages, as far as these hold no markup themselves.
3. Any other is refused: which parts of it are messages cannot be told.

A prompt that is a list of messages is taken as that.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias, cast

import jinja2

from tokentape_executor.errors import PromptRefused

Message: TypeAlias = Mapping[str, Any]
"""A chat message: `role` and `content`."""

Prompt: TypeAlias = "str | Sequence[Message]"
"""A user's question, or a conversation of several messages."""

_ADVICE = "leave out OpenRLHF's --data.apply_chat_template: the bridge applies the chat template"


class ChatTokenizer(Protocol):
    """The part of transformers' tokenizers that is needed."""

    @property
    def chat_template(self) -> object:
        """The template, if any."""
        ...

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a sequence."""
        ...

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a sequence."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens, special ones among them, by id."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """Render a conversation."""
        ...


class ChatMarkup:
    """What one tokenizer's chat template writes around messages. Learnt once, so that a date in it does not matter."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        """Learn the markup of `tokenizer`."""
        self._tokenizer = tokenizer
        self._forms = [form for roles in (["user"], ["system", "user"]) if (form := _Form.learn(tokenizer, roles))]
        self._marks = _marks(tokenizer, self._forms)

    def unwrap(self, prompt: object) -> Prompt:
        """Return what is asked by `prompt`: a lone user message's text, or a list of messages.

        Raises `PromptRefused` by the rule above, and where `prompt` is neither a string nor a list of messages.
        """
        if not isinstance(prompt, str):
            return _question(_checked(prompt))
        if not self._marked(prompt):
            return prompt
        for form in self._forms:
            contents = form.contents_of(prompt)
            if contents is not None and not any(map(self._marked, contents.values())) and self._made(contents):
                return _question([{"role": role, "content": content} for role, content in contents.items()])
        raise PromptRefused(
            "the prompt carries the chat template's markup, and not as the template writes it around one user message "
            f"(or a system and a user message); {_ADVICE}"
        )

    def _marked(self, text: str) -> bool:
        return any(mark in text for mark in self._marks)

    def _made(self, contents: Mapping[str, str]) -> bool:
        """Whether the template writes `contents` as they are; it may trim them, so that others were meant."""
        form = _Form.learn(self._tokenizer, list(contents))
        return form is not None and _render(self._tokenizer, contents) == form.around(contents)


@dataclass(frozen=True, slots=True)
class _Form:
    """What the template makes of one message of each of some roles."""

    roles: list[str]
    texts: list[str]
    """What it writes before the first message's content, and after each."""

    @classmethod
    def learn(cls, tokenizer: ChatTokenizer, roles: Sequence[str]) -> Self | None:
        """Render a conversation of `roles`; `None` where the template does not write each content once and in order."""
        sentinels = {role: f"tokentape{role}sentinel" for role in roles}
        rest = _render(tokenizer, sentinels)
        if rest is None or any(rest.count(sentinel) != 1 for sentinel in sentinels.values()):
            return None
        texts: list[str] = []
        for sentinel in sentinels.values():
            before, found, rest = rest.partition(sentinel)
            if not found:
                return None
            texts.append(before)
        return cls(list(roles), [*texts, rest])

    def around(self, contents: Mapping[str, str]) -> str:
        """Return the text with these contents, by role."""
        return self.texts[0] + "".join(
            contents[role] + text for role, text in zip(self.roles, self.texts[1:], strict=True)
        )

    def contents_of(self, prompt: str) -> dict[str, str] | None:
        """Return the contents by role, none longer than it must be; `None` where `prompt` has not this form."""
        first, *between, last = self.texts
        if not (prompt.startswith(first) and prompt.endswith(last) and len(prompt) >= len(first) + len(last)):
            return None
        contents = [prompt[len(first) : len(prompt) - len(last)]]
        for text in between:
            before, found, after = contents[-1].partition(text)
            if not found:
                return None
            contents[-1:] = [before, after]
        return dict(zip(self.roles, contents, strict=True))


def _render(tokenizer: ChatTokenizer, contents: Mapping[str, str]) -> str | None:
    """Return the conversation of `contents`, by role, as OpenRLHF renders it; `None` where the template refuses it."""
    if not tokenizer.chat_template:
        return None
    conversation = [{"role": role, "content": content} for role, content in contents.items()]
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    except jinja2.TemplateError:
        return None


def _marks(tokenizer: ChatTokenizer, forms: Sequence[_Form]) -> set[str]:
    """Return the texts of rule 1."""
    tokens = tokenizer.added_tokens_decoder.values()
    if not forms:
        return {str(token.content) for token in tokens if token.special}
    written = "".join(text for form in forms for text in form.texts)
    # Some tokenizers have added tokens for runs of spaces and line ends.
    texts = {str(token.content) for token in tokens if str(token.content).strip() and str(token.content) in written}
    return texts | {text for text in (tokenizer.bos_token, tokenizer.eos_token) if text}


def _checked(prompt: object) -> Sequence[Message]:
    """Return `prompt` as messages."""
    messages = _elements(prompt)
    if messages and all(isinstance(message, Mapping) and "role" in message for message in messages):
        return messages
    raise PromptRefused(f"a prompt is a string or a list of messages with a role, not {reprlib.repr(prompt)}")


def _elements(value: object) -> Sequence[Any]:
    return cast("Sequence[Any]", value) if isinstance(value, Sequence) else ()


def _question(messages: Sequence[Message]) -> Prompt:
    """Return a lone user message's text, and other conversations as they are."""
    if len(messages) == 1 and messages[0]["role"] == "user" and isinstance(messages[0].get("content"), str):
        return str(messages[0]["content"])
    return messages
