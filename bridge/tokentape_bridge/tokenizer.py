"""Text to token ids and back, with the sidecar's own tokenizer and chat template.

All methods are CPU work and safe to call from several threads at once.
"""

from __future__ import annotations

import inspect
import logging
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, cast

from jinja2 import TemplateError
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from tokentape_bridge.errors import ApiError
from tokentape_bridge.messages import TemplateMessage
from tokentape_bridge.text_decoder import TextDecoder, text_decoder
from tokentape_bridge.token_bytes import ShownToken, TokenBytes

_logger = logging.getLogger(__name__)

_CONTROL = re.compile("<[|\N{FULLWIDTH VERTICAL LINE}].*[|\N{FULLWIDTH VERTICAL LINE}]>")
"""What tokens that structure a conversation look like, where a vocabulary does not call them special (DeepSeek's)."""

_RAISE = re.compile(r"""raise_exception\(\s*(["'])(.*?)\1\s*\)""")
"""Where a chat template refuses messages, in words of its own."""


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
        added = tokenizer.added_tokens_decoder
        special = {token.content for token in added.values() if token.special or _CONTROL.fullmatch(token.content)}
        longest_first = sorted(special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._complaints = [match[2] for match in _RAISE.finditer(str(tokenizer.chat_template))]
        self.added_token_ids = frozenset(added)
        """The ids that `encode` gives to whole texts, whatever stands around them."""
        self._backend = tokenizer.backend_tokenizer
        self._bytes = TokenBytes(self._backend)
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}
        # The first use settles truncation and padding inside; later ones only read, so that threads can share it.
        tokenizer.encode("", add_special_tokens=False)

    @classmethod
    def load(cls, directory: Path, sha256: str) -> Self:
        """Read the files in `directory`. Raises `TokenizerError`."""
        # Imported here because it takes 1 s, and the process should answer before.
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

        # transformers' loaders have no usable types.
        loaders: list[Any] = [AutoTokenizer, PreTrainedTokenizerFast]
        file = directory / "tokenizer.json"
        try:
            tokenizer = loaders[0].from_pretrained(directory, trust_remote_code=False, local_files_only=True)
            if file.exists() and not _encodes_as(tokenizer, FastTokenizer.from_file(str(file))):
                # The class that tokenizer_config.json names may bring rules of its own: LlamaTokenizer loses DeepSeek's
                # spaces. What the model was trained on is in the file.
                _logger.warning("transformers' %s differs from tokenizer.json, which is used", type(tokenizer).__name__)
                tokenizer = loaders[1].from_pretrained(directory, local_files_only=True)
            return cls(tokenizer, sha256)
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

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Return the prompt's token ids: the template's text, encoded with the special tokens that it wrote, no more.

        The text of a special token in a message or a tool (`<|im_end|>` in a web page) is encoded as plain text.
        Raises `ApiError` when the template refuses the messages.
        """
        shielded, shielded_tools, shields = self.shield(messages, tools)
        text = self.render_text(
            shielded,
            tools=shielded_tools,
            template_arguments=template_arguments,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.encode_shielded(text, shields)

    def render_text(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
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
                continue_final_message=continue_final_message,
                tokenize=False,
                **template_arguments,
            )
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            # A template is a program over the client's messages; what it stumbles over is the client's to mend. An
            # error may quote the messages, and is not repeated but for the template's own words.
            own = next((words for words in self._complaints if words == str(error)), "")
            kind = type(error).__name__
            _logger.info("the chat template failed: %s", kind)
            problem = f"messages: the chat template cannot render them ({kind}{own and ': '}{own})"
            raise ApiError(problem[:300], param="messages", code="chat_template_error") from None

    def spells_special_token(self, value: object) -> bool:
        """Whether a text, or any text in a JSON value, has that of a special token, or of another mark of structure."""
        return any(self._special_pattern.search(text) for text in _texts_in(value))

    def shield(
        self, messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[TemplateMessage], list[Mapping[str, Any]], Mapping[str, str]]:
        """Return messages and tools with special tokens' texts in them replaced by marks, and the text of each mark."""
        found = {text for value in _texts_in([messages, tools]) for text in self._special_pattern.findall(value)}
        if not found:
            return list(messages), list(tools or ()), {}
        nonce = secrets.token_hex(8)
        # Small letters and digits: nothing that a template does to text, such as writing it as JSON, changes them.
        marks = {text: f"mark{nonce}n{index}e" for index, text in enumerate(sorted(found))}

        def mark(value: Any) -> Any:
            if isinstance(value, str):
                return self._special_pattern.sub(lambda match: marks[match[0]], value)
            if isinstance(value, Mapping):
                entries = cast("Mapping[str, object]", value)
                return {mark(key): mark(item) for key, item in entries.items()}
            return [mark(item) for item in cast("list[object]", value)] if isinstance(value, list) else value

        shields = {mark: text for text, mark in marks.items()}
        return [mark(message) for message in messages], [mark(tool) for tool in tools or ()], shields

    def encode_shielded(self, text: str, shields: Mapping[str, str]) -> list[int]:
        """Return the ids of `text` with its special tokens, but of the texts that marks stand for as plain text."""
        if not shields:
            return self.encode(text, add_special_tokens=False, field="messages")
        token_ids: list[int] = []
        # A template may have written all in capitals.
        for piece in re.split("(" + "|".join(map(re.escape, shields)) + ")", text, flags=re.IGNORECASE):
            special = shields.get(piece.lower())
            # Cut in two, a special token's text is no longer found as one.
            parts = (piece,) if special is None else (special[:1], special[1:])
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

    def decoder(self, *, skip_special_tokens: bool) -> TextDecoder:
        """Return what decodes one completion as it comes, to the text that `decode` has for all its ids."""
        return text_decoder(self._backend, self._bytes, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """Return the vocabulary's own text of a token; empty for an id outside it (a model's padding area)."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for."""
        return self._bytes.of(token_id)

    def shown(self, token_id: int) -> ShownToken:
        """Return how JSON shows a token."""
        return self._bytes.shown(token_id)


def _encodes_as(tokenizer: _PreTrainedTokenizer, file: FastTokenizer) -> bool:
    text = "It's  the 1234th caf\N{LATIN SMALL LETTER E WITH ACUTE}:\n\tif x<b>: \u65e5\u672c \N{HOT PEPPER}"
    return tokenizer.encode(text, add_special_tokens=False) == file.encode(text, add_special_tokens=False).ids


def _texts_in(value: object) -> Iterator[str]:
    """Yield all texts of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[str, object]", value).items():
            yield key
            yield from _texts_in(item)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[object]", value):
            yield from _texts_in(item)
