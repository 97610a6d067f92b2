"""What a rollout gives: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokentape_executor.errors import RolloutError
from tokentape_executor.trajectory import Trajectory

Row = Mapping[str, Any]
"""One task, as its agent takes it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent reports of one rollout."""

    reward: float
    truncated: bool = False
    """Whether it ended because a limit was reached, as far as the agent knows."""
    report: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The whole report."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout: what was sampled, and what it was worth."""

    tape_id: str
    trajectory: Trajectory
    outcome: Outcome
    attempts: int = 1
    """How often it was run; the last time is the one that is here."""
    failure: str | None = None
    """Where this is a placeholder: why the rollout failed the last time. Its one token is sampled from the rollout's
    prompt, and its reward is 0."""


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """One rollout that gave nothing, in its place among others."""

    task_index: int
    """Which of the tasks, from 0."""
    error: RolloutError
    """What it failed of the last time."""
    attempts: int = 1
    """How often it was run."""
