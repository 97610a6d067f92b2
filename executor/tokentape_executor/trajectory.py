"""What a rollout leaves: samples of token ids. Pure data."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tokentape.v1 import types_pb2
from tokentape_executor.errors import NothingSampled
from tokentape_executor.receipt import Receipt, SplitCause


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


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The tokens `[start, end)` of a sample, all sampled, came from one version of the weights."""

    start: int
    end: int
    weight_version: str
    """Empty while none was ever set."""
    boundary_uncertain: bool = False
    """Whether the version may in truth begin a few tokens before or after `start`."""
    stale_cache: bool = False
    """Whether cached computations of earlier weights were used, so that the log-probabilities are of no one version."""


@dataclass(frozen=True, slots=True)
class Action:
    """The tokens `[start, end)` of a sample: all that was sampled for one choice of one call."""

    start: int
    end: int
    call_index: int
    """Which call of the tape, from 0."""
    choice: int
    """Which of its choices."""
    finish_reason: FinishReason
    sampling: types_pb2.SamplingParameters
    """The parameters in force; not to be changed."""


@dataclass(frozen=True, slots=True)
class ParentLink:
    """The place in another sample of the trajectory from which a fork goes on: the first tokens are the same."""

    sample: int
    """The other sample's index."""
    token_count: int
    """How many of its first tokens are the fork's too. What was sampled of them is action only there."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to train on: T tokens, of which those in the actions were sampled, in order, by the model."""

    tokens: list[int]
    """T token ids: prompts, completions and what the agent put between them, exactly as the engine had them."""
    actions: list[Action]
    """Ascending, disjoint, none empty: `tokens[start:end]` was sampled after the prompt `tokens[:start]`."""
    logprobs: list[float]
    """T values: a sampled token's own log-probability in its action, 0.0 elsewhere."""
    version_spans: list[VersionSpan]
    """Ascending; together they cover the actions exactly."""
    call_indices: list[int]
    """The calls along the sample, in order, those without a sampled token included."""
    finish_reason: FinishReason
    """How its last call ended."""
    split_cause: SplitCause
    """Why it begins, and is not the continuation of another."""
    parent: ParentLink | None
    """Where it forks off. `None`: its prompt stands on its own."""
    lora_name: str = ""
    """The LoRA adapter that sampled all of its actions; empty: the base model."""

    @property
    def action_ranges(self) -> list[tuple[int, int]]:
        """The actions as half-open ranges of `tokens`."""
        return [(action.start, action.end) for action in self.actions]

    @property
    def action_token_count(self) -> int:
        """How many of the tokens were sampled."""
        return sum(action.end - action.start for action in self.actions)

    @property
    def last_call_index(self) -> int:
        """Which call of the tape, from 0, its last one was."""
        return self.call_indices[-1]

    @property
    def truncated(self) -> bool:
        """Whether a limit ended its last call. A limit that an earlier call met was no end: the sample went on."""
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All of one rollout."""

    samples: list[Sample]
    """In the order of their first calls. Every token that was kept is in exactly one action of exactly one of them."""
    receipt: Receipt
    """What became of every sampled token."""
    call_ids: list[str]
    """The calls' names at the sidecar, by their index on the tape."""

    def check_sampled(self) -> None:
        """Raise `NothingSampled` where no sampled token was kept, saying what became of those that were not."""
        if not self.samples:
            lost = ", ".join(f"{count} {reason}" for reason, count in self.receipt.dropped.items() if count) or "none"
            raise NothingSampled(f"no token to train on in {self.receipt.calls} calls; dropped: {lost}")
