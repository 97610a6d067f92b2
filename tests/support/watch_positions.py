"""A tape taken apart into its positions, so that two reads of it can be compared however each was grouped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokentape.v1.tape_pb2 import TapeEntry
from tokentape.v1.types_pb2 import TopLogprobs

Identity = tuple[str, object, int]
"""What a position is about: nothing else on a tape has the same, where each sampled token has an id of its own."""


def positions_of(entries: Iterable[TapeEntry]) -> Iterator[TapeEntry]:
    """Yield an entry per position, with its sequence number and without text: a run becomes one entry a token."""
    for entry in entries:
        if entry.WhichOneof("entry") == "tokens_sampled":
            yield from _tokens_of(entry)
        elif entry.call_started.text_pieces:
            yield _without_text(entry)
        else:
            yield entry


def _without_text(entry: TapeEntry) -> TapeEntry:
    bare = TapeEntry()
    bare.CopyFrom(entry)
    bare.call_started.ClearField("text_pieces")
    return bare


def _tokens_of(entry: TapeEntry) -> Iterator[TapeEntry]:
    run = entry.tokens_sampled
    k = run.top_logprobs.k
    for index, token_id in enumerate(run.token_ids):
        single = TapeEntry(sequence=entry.sequence + index, tokens_sampled=run)
        token = single.tokens_sampled
        token.ClearField("text_pieces")
        token.token_ids[:] = [token_id]
        # Slices, so that a column that is too short shows in the position and does not raise here.
        token.logprobs[:] = run.logprobs[index : index + 1]
        if run.HasField("top_logprobs"):
            best = slice(index * k, (index + 1) * k)
            token.top_logprobs.CopyFrom(
                TopLogprobs(k=k, token_ids=run.top_logprobs.token_ids[best], logprobs=run.top_logprobs.logprobs[best])
            )
        yield single


def identity_of(position: TapeEntry) -> Identity:
    """Return what a single position is about."""
    match position.WhichOneof("entry"):
        case "tokens_sampled":
            return "token", position.tokens_sampled.token_ids[0], 0
        case "call_started":
            return "started", position.call_started.call_id, 0
        case "choice_finished":
            finished = position.choice_finished
            return "finished", finished.call_id, finished.completion.choice
        case "call_failed":
            return "failed", position.call_failed.call_id, 0
        case "tape_sealed":
            return "sealed", "", 0
        case None:
            raise AssertionError("an empty entry")


def facts_of(position: TapeEntry) -> bytes:
    """Return all that a position says but its sequence number, as bytes that are equal for equal facts."""
    bare = TapeEntry()
    bare.CopyFrom(position)
    bare.sequence = 0
    return bare.SerializeToString(deterministic=True)
