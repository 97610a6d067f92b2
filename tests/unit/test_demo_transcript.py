"""The demo's transcripts: the text of each token, the spans, the JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tokentape_executor.demo.transcript import Span, Transcript, token_pieces


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte, so that most characters take several, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


TOKENIZER = byte_tokenizer()
END = TOKENIZER.get_vocab_size() - 1


def transcript(text: str, ranges: list[tuple[int, int]]) -> Transcript:
    token_ids = [*TOKENIZER.encode(text).ids, END]
    sampled = {position for start, end in ranges for position in range(start, end)}
    result = {
        "prompt": "a question",
        "label": "5",
        "reward": 1.0,
        "truncated": False,
        "action_ranges": ranges,
        "observation_tokens": token_ids,
        "rollout_log_probs": [-0.5 if position in sampled else 0.0 for position in range(len(token_ids))],
    }
    return Transcript.from_result(result, TOKENIZER, tape_id="main.00")


@given(st.text())
def test_pieces_joined_are_the_text(text: str) -> None:
    token_ids = TOKENIZER.encode(text).ids

    pieces = token_pieces(TOKENIZER, token_ids)

    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == text


@given(st.lists(st.integers(0, END)))
def test_pieces_joined_are_what_any_ids_decode_to(token_ids: list[int]) -> None:
    pieces = token_pieces(TOKENIZER, token_ids)

    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == TOKENIZER.decode(token_ids, skip_special_tokens=False)


def test_a_character_of_several_tokens_is_at_its_last() -> None:
    assert token_pieces(TOKENIZER, TOKENIZER.encode("a漢b").ids) == ("a", "", "", "漢", "b")


def test_half_a_character_at_the_end_is_shown_as_one() -> None:
    assert token_pieces(TOKENIZER, TOKENIZER.encode("a漢").ids[:-1]) == ("a", "", "\ufffd")


def test_special_tokens_are_spelled_out() -> None:
    assert token_pieces(TOKENIZER, [END, *TOKENIZER.encode("a").ids]) == ("<|end|>", "a")


@pytest.mark.parametrize(
    ("ranges", "spans"),
    [
        ([(2, 5)], [Span(0, 2, False), Span(2, 5, True)]),
        ([(0, 5)], [Span(0, 5, True)]),
        (
            [(1, 2), (2, 3), (4, 5)],
            [Span(0, 1, False), Span(1, 2, True), Span(2, 3, True), Span(3, 4, False), Span(4, 5, True)],
        ),
        ([(1, 2)], [Span(0, 1, False), Span(1, 2, True), Span(2, 5, False)]),
    ],
    ids=["one-turn", "all-sampled", "turns", "observation-last"],
)
def test_spans_cover_the_tokens(ranges: list[tuple[int, int]], spans: list[Span]) -> None:
    assert list(transcript("abcd", ranges).spans()) == spans


def test_mean_is_over_sampled_tokens_only() -> None:
    assert transcript("abcd", [(3, 5)]).mean_log_prob() == -0.5


def test_json_has_everything_that_a_trainer_needs_and_the_text() -> None:
    stored = json.loads(json.dumps(transcript("ab3+4", [(2, 6)]).to_json()))

    assert stored["prompt"] == "a question"
    assert stored["label"] == "5"
    assert stored["reward"] == 1.0
    assert stored["truncated"] is False
    assert stored["action_ranges"] == [[2, 6]]
    assert len(stored["observation_tokens"]) == len(stored["rollout_log_probs"]) == len(stored["pieces"]) == 6
    assert stored["rollout_log_probs"] == [0.0, 0.0, -0.5, -0.5, -0.5, -0.5]
    assert stored["completions"] == ["3+4<|end|>"]
    assert stored["tape_id"] == "main.00"
