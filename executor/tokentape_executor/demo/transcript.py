"""A finished rollout as the demo shows and stores it: the trainer's result, with the text of every single token.

Invariants: `pieces`, `rollout_log_probs` and `observation_tokens` have one length; joined, `pieces` are the decoded
tokens; the spans cover the tokens in order, without gap or overlap, and a span is sampled exactly if it is one of
`action_ranges`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Self

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens `[start, end)` of a rollout, all sampled in one call or all given to the engine."""

    start: int
    end: int
    sampled: bool


@dataclass(frozen=True, slots=True)
class Transcript:
    """A rollout's result, as `openrlhf_result` gives it, and its text. Positions and counts are in tokens."""

    prompt: str
    label: str
    reward: float
    truncated: bool
    action_ranges: tuple[tuple[int, int], ...]
    """`(start, end)` of each stretch that was sampled, in order."""
    observation_tokens: tuple[int, ...]
    """All token ids, the prompt's and the sampled ones."""
    rollout_log_probs: tuple[float, ...]
    """The natural log-probability of each sampled token; 0.0 where nothing was sampled."""
    pieces: tuple[str, ...]
    """The text that each token adds."""
    tape_id: str
    """The tape that recorded it."""

    @classmethod
    def from_result(cls, result: Mapping[str, Any], tokenizer: Tokenizer, *, tape_id: str) -> Self:
        """Take a rollout's `result`, with the tokenizer of the model that was sampled."""
        token_ids: list[int] = result["observation_tokens"]
        return cls(
            prompt=result["prompt"],
            label=result["label"],
            reward=result["reward"],
            truncated=result["truncated"],
            action_ranges=tuple(result["action_ranges"]),
            observation_tokens=tuple(token_ids),
            rollout_log_probs=tuple(result["rollout_log_probs"]),
            pieces=token_pieces(tokenizer, token_ids),
            tape_id=tape_id,
        )

    def spans(self) -> Iterator[Span]:
        """Yield the whole rollout as spans, in order; none is empty."""
        end = 0
        for start, stop in self.action_ranges:
            if end < start:
                yield Span(end, start, sampled=False)
            yield Span(start, stop, sampled=True)
            end = stop
        if end < len(self.observation_tokens):
            yield Span(end, len(self.observation_tokens), sampled=False)

    def sampled_positions(self) -> list[int]:
        """Return the positions of the sampled tokens, ascending."""
        return list(itertools.chain.from_iterable(range(start, end) for start, end in self.action_ranges))

    def mean_log_prob(self) -> float:
        """Return the mean natural log-probability of the sampled tokens. Raises `ValueError` where there is none."""
        return fmean(self.rollout_log_probs[position] for position in self.sampled_positions())

    def to_json(self) -> dict[str, Any]:
        """Return the rollout as one JSON object, with the text of each action range as `completions`."""
        completions = ["".join(self.pieces[start:end]) for start, end in self.action_ranges]
        return {**asdict(self), "completions": completions}


def token_pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text that each of `token_ids` adds to those before it, special tokens spelled out.

    Where several tokens spell one character, the last of them has it and the others have none. Bytes that never become
    a character are shown as U+FFFD.
    """
    stream = DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(tokenizer, token_id) or "" for token_id in token_ids]
    if pieces:
        # The stream keeps back what may still become a character.
        text: str = tokenizer.decode(token_ids, skip_special_tokens=False)
        pieces[-1] += text.removeprefix("".join(pieces))
    return tuple(pieces)
