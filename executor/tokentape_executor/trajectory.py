"""What a rollout leaves: samples of token ids. Pure data."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """Why a completion got no more tokens."""

    STOP = "stop"
    """The model sampled a stop token, or spelled a stop string."""
    LENGTH = "length"
    """A limit was reached: `max_tokens`, the context, or the tape's."""
    ABORT = "abort"
    """It was aborted, by its client or by the seal."""
    REPETITION = "repetition"
    """The engine stopped an endless repetition."""
    FAILED = "failed"
    """Its call failed; the tokens sampled until then stand."""

    @property
    def complete(self) -> bool:
        """Whether the model, or a limit, ended the completion, so that its client got all of it."""
        return self not in {FinishReason.ABORT, FinishReason.FAILED}


class Beginning(enum.Enum):
    """Why a sample begins where it does, and not as the continuation of another."""

    PROMPT = "prompt"
    """Its first call had no parent: a prompt that stands on its own."""
    FORK = "fork"
    """Its first call continues a place that another sample went on from, or stopped short of."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The tokens `[start, end)` of a sample, all sampled, came from one version of the weights."""

    start: int
    end: int
    weight_version: str
    """Empty while none was ever set."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to train on: T tokens, of which those in the action ranges were sampled, in order, by the model."""

    tokens: list[int]
    """T token ids: prompts, completions and what the agent put between them, exactly as the engine had them."""
    action_ranges: list[tuple[int, int]]
    """Half-open, ascending, disjoint, never empty: `tokens[s:e]` was sampled after the prompt `tokens[:s]`."""
    logprobs: list[float]
    """T values: a sampled token's own log-probability in its action range, 0.0 elsewhere."""
    version_spans: list[VersionSpan]
    """Ascending; together they cover the action ranges exactly."""
    call_ids: list[str]
    """The calls along the sample, in order."""
    finish_reason: FinishReason
    """How its last call ended."""
    last_call_index: int
    """Which call of the tape, from 0, its last one was."""
    beginning: Beginning
    """Why it begins."""

    @property
    def action_token_count(self) -> int:
        """How many of the tokens were sampled."""
        return sum(end - start for start, end in self.action_ranges)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All of one rollout."""

    samples: list[Sample]
    """In the order of their first calls. Every sampled token is in exactly one range of exactly one of them."""
    call_count: int
    """Calls on the tape, those without a sampled token included."""
    sampled_token_count: int
    """Tokens sampled on the tape."""
