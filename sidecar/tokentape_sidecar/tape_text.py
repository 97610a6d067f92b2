"""The text of tokens for watchers who ask for it, by the tokenizer that the archive holds.

The tokenizer is read when the first of them asks; until then it costs nothing. New tokens are decoded in a thread, so
that a long prompt does not hold up the streams of others.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Iterable

from tokentape.text_pieces import TextPieces
from tokentape_sidecar.errors import TextUnavailable
from tokentape_sidecar.tape import CallStarted, Entry, TokensSampled


class TapeText:
    """The text of the tokens on tapes."""

    def __init__(self, tokenizer_archive: bytes) -> None:
        """`tokenizer_archive` is what `pack_tokenizer` makes."""
        self._archive = tokenizer_archive
        self._reading = asyncio.Lock()
        self._pieces: TextPieces | None = None

    async def of(self, entries: Iterable[Entry]) -> TextPieces:
        """Return pieces that have all tokens of `entries`. Raises `TextUnavailable` where no tokenizer can be read."""
        async with self._reading:
            if self._pieces is None:
                self._pieces = await asyncio.to_thread(_read, self._archive)
        pieces = self._pieces
        new = {token_id for entry in entries for token_id in _token_ids(entry) if token_id not in pieces}
        if new:
            await asyncio.to_thread(_decode, pieces, new)
        return pieces


def _token_ids(entry: Entry) -> Iterable[int]:
    match entry:
        case CallStarted(record=record):
            return record.prompt_suffix
        case TokensSampled(run=run):
            return run.token_ids
        case _:
            return ()


def _decode(pieces: TextPieces, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        pieces[token_id]


def _read(archive: bytes) -> TextPieces:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as files:
        try:
            file = files.extractfile("tokenizer.json")
        except KeyError:
            file = None
        if file is None:
            raise TextUnavailable("include_text: the model has no tokenizer.json; leave it out to get the ids")
        content = file.read()
    try:
        return TextPieces.from_json(content.decode())
    except ValueError as error:
        raise TextUnavailable(f"include_text: the model's tokenizer.json cannot be read: {error}") from None
