"""Text to token ids and back, with the sidecar's own tokenizer and chat template.

All methods are CPU work and safe to call from several threads at once.
"""

from __future__ import annotations

import inspect
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from jinja2 import TemplateError
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from tokentape_bridge.errors import ApiError
from tokentape_bridge.messages import TemplateMessage
from tokentape_bridge.token_bytes import TokenBytes

_logger = logging.getLogger(__name__)


class TokenizerError(Exception):
    """The files hold no tokenizer that transformers can load without running code from them."""


class _PreTrainedTokenizer(Protocol):
    """What is used of transformers' tokenizers, typed."""

    @property
    def backend_tokenizer(self) -> FastTokenizer: ...
    @property
    def chat_template(self) -> object: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...
    def apply_chat_template(self, conversation: Sequence[TemplateMessage], **options: object) -> str: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...


class Tokenizer:
    """A tokenizer with its chat template. `sha256` identifies the files it came from."""

    def __init__(self, tokenizer: _PreTrainedTokenizer, sha256: str) -> None:
        """Use `load`."""
        self.sha256 = sha256
        self._tokenizer = tokenizer
        self._special_texts = frozenset(
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        )
        self._bytes = TokenBytes(tokenizer.backend_tokenizer)
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}
        # The first use settles truncation and padding inside; later ones only read, so that threads can share it.
        tokenizer.encode("", add_special_tokens=False)

    @classmethod
    def load(cls, directory: Path, sha256: str) -> Self:
        """Read the files in `directory`. Raises `TokenizerError`."""
        # Imported here because it takes 1 s, and the process should answer before.
        from transformers import AutoTokenizer  # noqa: PLC0415

        try:
            # transformers' loaders have no usable types.
            loaders: Any = AutoTokenizer
            return cls(loaders.from_pretrained(directory, trust_remote_code=False, local_files_only=True), sha256)
        except Exception as error:
            raise TokenizerError(f"transformers cannot load the sidecar's tokenizer: {error}") from error

    @property
    def transformers_tokenizer(self) -> object:
        """Transformers' own object, for libraries that want one."""
        return self._tokenizer

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._tokenizer.chat_template)

    def template_mentions(self, text: str) -> bool:
        """Whether the chat template has `text` in it, so that it may write it into a prompt."""
        return text in str(self._tokenizer.chat_template)

    @property
    def special_texts(self) -> frozenset[str]:
        """The texts that `encode` takes for special tokens."""
        return self._special_texts

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> list[int]:
        """Return the prompt's token ids: the template's text, encoded with the special tokens that it wrote, no more.

        The text of a special token in a message (`<|im_end|>` in a web page) is encoded as plain text. Raises
        `ApiError` when the template refuses the messages.
        """
        shielded, shields = self.shield(messages)
        text = self.render_text(
            shielded,
            tools=tools,
            template_arguments=template_arguments,
            add_generation_prompt=add_generation_prompt,
        )
        return self.encode_shielded(text, shields)

    def render_text(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        """Return the template's text. Raises `ApiError` when the template refuses the messages."""
        if reserved := self._reserved & template_arguments.keys():
            field = "chat_template_kwargs"
            raise ApiError(f"{field}: {min(reserved)!a} cannot be set here", param=field, code="invalid_value")
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_arguments,
            )
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A template is a program over the client's messages; what it stumbles over is the client's to mend.
            _logger.info("the chat template failed", exc_info=error)
            problem = f"messages: the chat template cannot render them ({type(error).__name__}: {error})"
            raise ApiError(problem[:300], param="messages", code="chat_template_error") from error

    def shield(self, messages: Sequence[TemplateMessage]) -> tuple[list[TemplateMessage], Mapping[str, str]]:
        """Return the messages with special tokens' texts in them replaced by marks, and the text of each mark."""
        if not any(text in str(message["content"]) for message in messages for text in self._special_texts):
            return list(messages), {}
        nonce = secrets.token_hex(8)
        marks = {text: f"\ue000{nonce}-{index}\ue001" for index, text in enumerate(sorted(self._special_texts))}
        pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))

        def mark(message: TemplateMessage) -> TemplateMessage:
            return {**message, "content": pattern.sub(lambda found: marks[found[0]], str(message["content"]))}

        return [mark(message) for message in messages], {mark: text for text, mark in marks.items()}

    def encode_shielded(self, text: str, shields: Mapping[str, str]) -> list[int]:
        """Return the ids of `text` with its special tokens, but of the texts that marks stand for as plain text."""
        if not shields:
            return self.encode(text, add_special_tokens=False, field="messages")
        token_ids: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, shields)) + ")", text):
            # Cut in two, a special token's text is no longer found as one.
            parts = (shields[piece][:1], shields[piece][1:]) if piece in shields else (piece,)
            for part in parts:
                token_ids += self.encode(part, add_special_tokens=False, field="messages")
        return token_ids

    def encode(self, text: str, *, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        """Return the token ids of `text`, which came from the request's `field`.

        Raises `ApiError` for text that is no Unicode (a lone surrogate).
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, ValueError) as error:
            raise ApiError(f"{field}: is not valid Unicode text", param=field, code="invalid_value") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`; an incomplete character at an end is U+FFFD."""
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for."""
        return self._bytes.of(token_id)
