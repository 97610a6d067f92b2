"""A tape's calls as the assembler has taken them: a tree, since a prompt may continue an earlier completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokentape.v1 import types_pb2
from tokentape_executor.receipt import SplitCause
from tokentape_executor.trajectory import FinishReason


class WeightRun(NamedTuple):
    """Consecutive tokens of a choice that one version of the weights sampled; it ends where the next begins."""

    start: int
    """Its first token's index within the choice."""
    weight_version: str
    boundary_uncertain: bool
    stale_cache: bool


@dataclass(slots=True)
class Choice:
    """One completion: columns of equal length, the versions of the weights as runs, and how it ended."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    weight_runs: list[WeightRun] = field(default_factory=list[WeightRun])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token's id or the stop string, where it was one that the call asked for."""

    @property
    def complete(self) -> bool:
        """Whether the model, or a limit, ended it."""
        return self.finish_reason is not None and self.finish_reason.complete

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], run: WeightRun) -> None:
        """Take tokens of one `run`; how they were chunked leaves no trace."""
        if not self.weight_runs or self.weight_runs[-1][1:] != run[1:]:
            self.weight_runs.append(run)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)


@dataclass(slots=True)
class Call:
    """One call: the ids of its prompt after its parent's, and its choices."""

    call_id: str
    index: int
    parent: tuple[Call, int] | None
    """The call and the choice that the prompt continues."""
    kept: int
    """How many of that choice's sampled tokens the prompt has."""
    prompt_token_ids: list[int]
    """The ids that follow the parent's."""
    prompt_token_count: int
    """Tokens in the whole prompt."""
    sampling: types_pb2.SamplingParameters
    """The parameters in force."""
    split_cause: SplitCause
    """Where there is no parent: why."""
    lora_name: str
    """The LoRA adapter that samples it, as its parent; empty: the base model."""
    choices: list[Choice]

    @property
    def parent_place(self) -> tuple[int, int, int] | None:
        """Where the prompt begins: the parent's index, its choice, and how many of its tokens are kept."""
        return None if self.parent is None else (self.parent[0].index, self.parent[1], self.kept)

    def prompt(self) -> list[int]:
        """Return the whole prompt."""
        pieces = [self.prompt_token_ids]
        call = self
        while call.parent is not None:
            parent, choice = call.parent
            pieces += [parent.choices[choice].token_ids[: call.kept], parent.prompt_token_ids]
            call = parent
        return [token_id for piece in reversed(pieces) for token_id in piece]
