"""A completion's text as its ids come: it is the whole's text, given as soon as nothing can change it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from support.text_cuts import cut, every_cut, places
from support.tokenizers import KINDS, LoadChatModel
from tokentape.v1 import types_pb2
from tokentape.v1.types_pb2 import Completion
from tokentape_bridge.text_stream import TextOptions, TextStream, TextStreamError, completion_text
from tokentape_bridge.tokenizer import Tokenizer

PEPPER, FAMILY = "\N{HOT PEPPER}", "\U0001f469\u200d\U0001f469\u200d\U0001f467"
TEXTS = [
    f"{PEPPER}\ufe0f e\u0301 {FAMILY} n\u00e9e \u00bd",
    "\u65e5\u672c\u8a9e \u0e20\u0e32\u0e29\u0e32 \u0627\u0644",
    "a\u2028b\u0085c\r\nd",
    " , plain 's  text .\n\n\tx",
    "\x00\ufffd|\ufffd",
]
FALLBACK = "byte fallback"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LoadTokenizer = Callable[[str], Tokenizer]


def fallback_tokenizer() -> Tokenizer:
    """A tokenizer like Llama 2's: few pieces, a token for each byte, and a space that decoding takes off the front."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581ab,\u00e9", "\u2581a", "\u2581\u2581"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    fast = FastTokenizer(model)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    fast.add_special_tokens([AddedToken("</s>", special=True)])
    loaded: Any = PreTrainedTokenizerFast(tokenizer_object=fast)
    return Tokenizer(loaded, FALLBACK)


@pytest.fixture(scope="session")
def tokenizer(chat_model: LoadChatModel) -> LoadTokenizer:
    """Return the tokenizer of one of `KINDS`, or the one above."""
    fallback = fallback_tokenizer()
    return lambda kind: fallback if kind == FALLBACK else chat_model(kind).tokenizer


def odd_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids that no tokenizer would give: with characters' parts, special tokens and ids outside the vocabulary."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    # Of byte-level vocabularies these are single bytes, of others they may be bytes as well.
    ids = st.one_of(st.integers(0, 300), st.sampled_from(sorted(tokenizer.added_token_ids)), st.just(10**6))
    places = st.tuples(st.sampled_from(encoded), st.integers(0, 30), st.integers(1, 6))
    pieces = st.one_of(ids.map(lambda token_id: [token_id]), places.map(lambda at: at[0][at[1] : at[1] + at[2]]))
    return st.lists(pieces, max_size=8).map(lambda some: list(itertools.chain.from_iterable(some)))


@pytest.mark.parametrize("kind", [*KINDS, FALLBACK])
def test_any_ids_decode_to_what_the_whole_does_A08(tokenizer: LoadTokenizer, kind: str) -> None:
    chosen = tokenizer(kind)

    @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(odd_ids(chosen), places(), st.booleans())
    def check(ids: list[int], where: list[int], skip: bool) -> None:
        decoder = chosen.decoder(skip_special_tokens=skip)
        given_so_far = ""
        whole = chosen.decode(ids, skip_special_tokens=skip)
        for piece in cut(ids, where):
            given_so_far += decoder.push(piece)
            assert whole.startswith(given_so_far)

    check()


@pytest.mark.parametrize("kind", [*KINDS, FALLBACK])
@pytest.mark.parametrize("text", TEXTS[:4], ids=["emoji", "scripts", "separators", "plain"])
def test_characters_come_whole_A08_C11(tokenizer: LoadTokenizer, kind: str, text: str) -> None:
    chosen = tokenizer(kind)
    ids = chosen.encode(text, add_special_tokens=False)
    text = chosen.decode(ids, skip_special_tokens=True)
    for pieces in every_cut(ids):
        stream = TextStream(chosen, TextOptions())
        given_out = [stream.push(piece) for piece in pieces]
        assert not any(REPLACEMENT in out for out in given_out)
        given_out.append(stream.finish(ended(types_pb2.FINISH_REASON_LENGTH)))
        assert "".join(given_out) == text


def test_what_is_complete_is_not_held(tokenizer: LoadTokenizer) -> None:
    stream = TextStream(tokenizer("smollm2"), TextOptions())
    ids = tokenizer("smollm2").encode(f"ab{PEPPER}", add_special_tokens=False)
    assert "".join(stream.push([token_id]) for token_id in ids) == f"ab{PEPPER}"


@pytest.mark.parametrize("kind", ["smollm2", "qwen3", FALLBACK])
def test_a_cut_character_is_replaced_once_it_cannot_complete_A08(tokenizer: LoadTokenizer, kind: str) -> None:
    chosen = tokenizer(kind)
    ids = [*chosen.encode("a", add_special_tokens=False), *chosen.encode(PEPPER, add_special_tokens=False)[:-1]]
    stream = TextStream(chosen, TextOptions())
    given_out = "".join(stream.push([token_id]) for token_id in ids)
    assert REPLACEMENT not in given_out
    rest = stream.finish(ended(types_pb2.FINISH_REASON_LENGTH))
    assert given_out + rest == chosen.decode(ids, skip_special_tokens=True)


def ended(reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_STOP, **stop: Any) -> Completion:
    return Completion(finish_reason=reason, **stop)


def streamed(
    tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], completion: Completion, options: TextOptions
) -> str:
    stream = TextStream(tokenizer, options)
    return "".join([*(stream.push(piece) for piece in pieces), stream.finish(completion)])


@pytest.mark.parametrize("skip", [True, False])
def test_a_last_token_that_stops_is_no_text(tokenizer: LoadTokenizer, skip: bool) -> None:
    chosen = tokenizer("smollm2")
    [word] = chosen.encode(" two", add_special_tokens=False)
    ids = [*chosen.encode("one", add_special_tokens=False), word, 2, word, word, 2]
    options = TextOptions(stop_token_ids=frozenset({word, 2}), skip_special_tokens=skip)
    for count in range(1, len(ids) + 1):
        for pieces in every_cut(ids[:count]):
            may_stop = ids[count - 1] in options.stop_token_ids
            for reason in (types_pb2.FINISH_REASON_LENGTH, *([types_pb2.FINISH_REASON_STOP] if may_stop else [])):
                whole = completion_text(chosen, ids[:count], ended(reason), options)
                assert streamed(chosen, pieces, ended(reason), options) == whole


def test_text_that_turns_out_to_be_otherwise_is_an_error(tokenizer: LoadTokenizer) -> None:
    chosen = tokenizer("smollm2")
    with pytest.raises(TextStreamError):
        # A token ended it that nobody had said may do so.
        streamed(chosen, [chosen.encode("one two", add_special_tokens=False)], ended(), TextOptions())


ALPHABET = st.text("abE N", max_size=24)


@pytest.mark.parametrize("kind", ["smollm2", FALLBACK])
def test_stop_strings_are_never_begun(tokenizer: LoadTokenizer, kind: str) -> None:
    chosen = tokenizer(kind)

    @settings(max_examples=300, deadline=None)
    @given(
        ALPHABET,
        st.lists(st.text("abE N", min_size=1, max_size=4), min_size=1, max_size=3),
        st.integers(0, 6),
        places(),
        st.booleans(),
    )
    def check(text: str, stops: list[str], min_tokens: int, where: list[int], matches: bool) -> None:
        options = TextOptions(stop=stops, min_tokens=min_tokens)
        ids = chosen.encode(text, add_special_tokens=False)
        # A sidecar's engine ends a completion with the token that completes a stop string; whatever it does, the
        # streamed text is the whole's.
        for count in range(len(ids) + 1):
            found = next((stop for stop in stops if stop in chosen.decode(ids[:count], skip_special_tokens=True)), None)
            if found and matches and count > min_tokens:
                ids = ids[:count]
                completion = ended(stop_string=found)
                break
        else:
            completion = ended(types_pb2.FINISH_REASON_LENGTH)
        whole = completion_text(chosen, ids, completion, options)
        assert streamed(chosen, cut(ids, where), completion, options) == whole
        # Several may end at the same token.
        for other in stops:
            completion = ended(stop_string=other)
            whole = completion_text(chosen, ids, completion, options)
            assert streamed(chosen, cut(ids, where), completion, options) == whole

    check()


def test_only_what_may_begin_a_stop_string_is_held(tokenizer: LoadTokenizer) -> None:
    chosen = tokenizer("smollm2")
    stream = TextStream(chosen, TextOptions(stop=["END", "\n\n"]))
    pieces = ["a", "E", "N", "b", "\n", "c", "E", "N", "D", "d"]
    out = [stream.push(chosen.encode(piece, add_special_tokens=False)) for piece in pieces]
    assert out == ["a", "", "", "ENb", "", "\nc", "", "", "", ""]
    assert stream.finish(ended(stop_string="END")) == ""


@pytest.mark.parametrize("kind", ["smollm2", FALLBACK])
def test_bytes_that_are_no_characters_take_no_more_than_a_moment(tokenizer: LoadTokenizer, kind: str) -> None:
    chosen = tokenizer(kind)
    [*_, last] = chosen.encode(PEPPER, add_special_tokens=False)
    stream = TextStream(chosen, TextOptions(stop=["x"]))
    began = time.process_time()
    for _ in range(20_000):
        stream.push([last])
    stream.finish(ended(types_pb2.FINISH_REASON_LENGTH))
    # The square of the length would be a minute.
    assert time.process_time() - began < 10
