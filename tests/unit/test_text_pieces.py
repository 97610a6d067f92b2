"""The text of single tokens, on real tokenizers: what people see beside the ids."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from support.tokenizers import KINDS, TokenizerDirectory
from tokentape.text_pieces import TextPieces

TEXT = " The  quick\n\tbrown fox, 3 + 4 = 7; naïve 日本"
HALVES = "\U000f0001"
"""A character that no vocabulary has a token for."""


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tokenizer_directory: TokenizerDirectory) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_directory(request.param) / "tokenizer.json"))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_pieces_read_as_the_text_does_spaces_included(tokenizer: Tokenizer) -> None:
    pieces = TextPieces(tokenizer)
    for word in TEXT.split(" "):
        ids = ids_of(tokenizer, f"x {word}")
        texts = [pieces[token_id] for token_id in ids]
        if not any("\ufffd" in text for text in texts):
            assert "".join(texts) == f"x {word}"


def test_special_tokens_are_spelled_out(tokenizer: Tokenizer) -> None:
    pieces = TextPieces(tokenizer)
    special = [(i, token) for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    assert special
    for token_id, token in special[:20]:
        assert pieces[token_id] == token.content


def test_what_is_no_whole_character_shows_as_a_replacement(tokenizer: Tokenizer) -> None:
    pieces = TextPieces(tokenizer)
    texts = [pieces[token_id] for token_id in ids_of(tokenizer, HALVES)]
    assert all(texts)
    assert any("\ufffd" in text for text in texts)


def test_an_id_that_the_tokenizer_lacks_shows_as_a_replacement(tokenizer: Tokenizer) -> None:
    assert TextPieces(tokenizer)[tokenizer.get_vocab_size() + 100_000] == "\ufffd"


def test_what_was_decoded_is_kept(tokenizer: Tokenizer) -> None:
    pieces = TextPieces(tokenizer)
    token_id = ids_of(tokenizer, "fox")[0]
    assert token_id not in pieces
    assert pieces[token_id] == pieces[token_id]
    assert token_id in pieces


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="not a tokenizer"):
        TextPieces.from_json('{"version": "1.0"}')
