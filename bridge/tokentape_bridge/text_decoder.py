"""Token ids to text as they come, each piece as soon as nothing that follows can change it.

Two decoders, since one library has neither alone right:

- Byte-level vocabularies: the tokens' bytes, through Python's incremental UTF-8 decoder. (`DecodeStream` of tokenizers
  decodes all bytes since the last complete character again with each token: bytes that never make one cost it the
  square of their number.)
- All others: `DecodeStream`. It is given a run of byte tokens (`<0xC3>`) in one piece, with the token that ends the
  run: such a run decodes to characters only if all of it is UTF-8, so what its first bytes say is not certain before.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from tokentape_bridge.token_bytes import TokenBytes


class TextDecoder(Protocol):
    """Decodes one completion. What it returned so far is always the beginning of what all ids decode to."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; return the text that became certain. It never ends within a character."""
        ...


def text_decoder(tokenizer: FastTokenizer, token_bytes: TokenBytes, *, skip_special_tokens: bool) -> TextDecoder:
    """Return a decoder for one completion. `token_bytes` are the tokenizer's."""
    if token_bytes.is_byte_level:
        return _ByteLevelDecoder(token_bytes, skip_special_tokens=skip_special_tokens)
    return _RunDecoder(tokenizer, token_bytes, skip_special_tokens=skip_special_tokens)


class _ByteLevelDecoder:
    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool) -> None:
        self._bytes_of = token_bytes.of
        self._skipped = token_bytes.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        data = b"".join(self._bytes_of(token_id) for token_id in token_ids if token_id not in self._skipped)
        return self._decoder.decode(data)


class _RunDecoder:
    def __init__(self, tokenizer: FastTokenizer, token_bytes: TokenBytes, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._bytes = token_bytes.byte_token_ids
        self._skipped = token_bytes.special_token_ids if skip_special_tokens else frozenset[int]()
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._run: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        pieces: list[str] = []
        for token_id in token_ids:
            self._run.append(token_id)
            if self._ends_run(token_id):
                pieces.append(self._stream.step(self._tokenizer, self._run) or "")
                self._run.clear()
        return "".join(pieces)

    def _ends_run(self, token_id: int) -> bool:
        """Whether a token is seen by the decoder, and is no byte."""
        if token_id in self._bytes or token_id in self._skipped:
            return False
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token is not None
