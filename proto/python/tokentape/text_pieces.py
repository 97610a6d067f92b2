"""The text of single tokens, for people who look at ids."""

from __future__ import annotations

from typing import Self

from tokenizers import Tokenizer

_UNKNOWN = "\ufffd"
_ANCHOR_TEXT = "a"


class TextPieces:
    """The text of each token, decoded on its own, as it reads after other text; what was decoded once is kept.

    Special tokens are spelled out. A token that is no whole character, and an id that the tokenizer does not have, show
    as U+FFFD. Joined, pieces read as the text does, except where a character is spread over several tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Some decoders drop the space that a text begins with. So each token is decoded after a letter.
        self._anchor = tokenizer.encode(_ANCHOR_TEXT, add_special_tokens=False).ids[-1:]
        self._anchor_text = self._decode(self._anchor)
        self._pieces: dict[int, str] = {}

    @classmethod
    def from_json(cls, tokenizer_json: str) -> Self:
        """Read the content of a `tokenizer.json`. Raises `ValueError` where it is none."""
        try:
            tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
            raise ValueError(f"not a tokenizer: {error}") from None
        return cls(tokenizer)

    def __contains__(self, token_id: int) -> bool:
        """Whether this token was decoded already."""
        return token_id in self._pieces

    def __getitem__(self, token_id: int) -> str:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def _piece(self, token_id: int) -> str:
        if self._tokenizer.id_to_token(token_id) is None:
            return _UNKNOWN
        text = self._decode([*self._anchor, token_id])
        if text.startswith(self._anchor_text):
            return text.removeprefix(self._anchor_text)
        return self._decode([token_id])

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
