"""The bytes that each token stands for: exact where a token holds half a character, which text cannot show."""

from __future__ import annotations

import re
from typing import NamedTuple

from tokenizers import Tokenizer as FastTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class ShownToken(NamedTuple):
    """A token as JSON shows it."""

    text: str
    """With U+FFFD for what is no whole character."""
    byte_values: tuple[int, ...]
    """Its bytes."""


class TokenBytes:
    """Looks up tokens' bytes. For byte-level and byte-fallback vocabularies they join to the text's UTF-8."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        """`tokenizer` is the fast tokenizer behind a transformers one."""
        self._id_to_token = tokenizer.id_to_token
        # Each token is looked up once: answers say the same ones again and again.
        self._found: dict[int, bytes] = {}
        self._shown: dict[int, ShownToken] = {}
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.is_byte_level = tokenizer.decoder is not None and b'"ByteLevel"' in tokenizer.decoder.__getstate__()
        """Whether tokens are written in byte-level BPE's alphabet, a character for each byte."""
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """The ids of tokens that `skip_special_tokens` leaves out."""
        self.byte_token_ids = frozenset(tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)) - {None}
        """The ids of tokens that are one byte each, where a vocabulary falls back to them."""

    def of(self, token_id: int) -> bytes:
        """Return the bytes of `token_id`; none for an id outside the vocabulary (a model's padding area)."""
        found = self._found.get(token_id)
        if found is None:
            found = self._found[token_id] = self._find(token_id)
        return found

    def shown(self, token_id: int) -> ShownToken:
        """Return how JSON shows `token_id`."""
        shown = self._shown.get(token_id)
        if shown is None:
            data = self.of(token_id)
            shown = self._shown[token_id] = ShownToken(data.decode(errors="replace"), tuple(data))
        return shown

    def _find(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token: str | None = self._id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary: printable ones are themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(shifted)}


_BYTE_OF = _byte_level_alphabet()
