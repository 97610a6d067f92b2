"""What one rollout may take. Its calls and tokens are bounded by its tape, its time here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, fields, replace
from typing import Self

from tokentape.v1 import tape_pb2
from tokentape_executor.errors import RolloutTimeout
from tokentape_executor.settings import ExecutorSettings
from tokentape_executor.tape_client import TapeOptions


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of each attempt of a rollout; `None` is none."""

    rollout_seconds: float | None = None
    """Longest time that the agent may run."""
    turn_seconds: float | None = None
    """Longest time from a call's end (or the agent's start) to the next call's end (or the agent's)."""
    max_turns: int | None = None
    """Most calls; the bridge refuses later ones with the code `limit_reached`."""
    max_sampled_tokens: int | None = None
    """Most tokens sampled: calls are clamped to what is left, and then refused with the code `limit_reached`."""
    max_weight_changes: int | None = None
    """Most changes of the weights that a call may live through after its first token; 0: none. A call that meets one
    more fails with the code `stale_weights`."""

    def __post_init__(self) -> None:
        """Raise `ValueError` where a limit is not above 0; `max_weight_changes` may be 0."""
        for field in fields(self):
            value = getattr(self, field.name)
            least_is_0 = field.name == "max_weight_changes"
            if value is not None and (value < 0 or (value == 0 and not least_is_0)):
                least = "0 or more" if least_is_0 else "above 0"
                raise ValueError(f"{field.name}: must be {least} (None: no limit), not {value}")

    @classmethod
    def from_settings(cls, settings: ExecutorSettings) -> Self:
        """Return the limits that the settings have."""
        return cls(
            rollout_seconds=settings.rollout_timeout_seconds,
            turn_seconds=settings.turn_timeout_seconds,
            max_turns=settings.max_turns,
            max_sampled_tokens=settings.max_sampled_tokens,
            max_weight_changes=settings.max_weight_changes,
        )

    def on_tape(self, options: TapeOptions) -> TapeOptions:
        """Return `options` with these limits as well; of two the smaller holds."""
        return replace(
            options,
            max_calls=_smaller(self.max_turns, options.max_calls),
            max_sampled_tokens=_smaller(self.max_sampled_tokens, options.max_sampled_tokens),
            max_weight_changes=_smaller(self.max_weight_changes, options.max_weight_changes),
        )


NO_LIMITS = RolloutLimits()
"""As long, and as much, as the agent likes."""


class RolloutClock:
    """Bounds the time of one attempt, which it follows by the entries of its tape."""

    def __init__(self, limits: RolloutLimits) -> None:
        self._limits = limits
        self._turn = 1
        self._running: dict[str, int] = {}
        """How many choices each call has that has not ended."""
        self._turn_timeout: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Cancel the block, and raise `RolloutTimeout`, when a limit is reached."""
        limits = self._limits
        try:
            async with asyncio.timeout(limits.rollout_seconds), asyncio.timeout(limits.turn_seconds) as turn:
                self._turn_timeout = turn
                yield
        except TimeoutError:
            raise self._expired() from None
        finally:
            self._turn_timeout = None

    def feed(self, entry: tape_pb2.TapeEntry) -> None:
        """Take the next entry of the tape: where it ends a call, the next turn begins."""
        match entry.WhichOneof("entry"):
            case "call_started":
                started = entry.call_started
                self._running[started.call_id] = started.sampling.n if started.sampling.HasField("n") else 1
            case "choice_finished":
                self._running[entry.choice_finished.call_id] -= 1
                if self._running[entry.choice_finished.call_id] == 0:
                    self._next_turn()
            case "call_failed":
                self._next_turn()
            case _:
                pass

    def _next_turn(self) -> None:
        self._turn += 1
        timeout, seconds = self._turn_timeout, self._limits.turn_seconds
        # One that has just expired, though the block does not know yet, cannot be put off any more.
        if timeout is not None and seconds is not None and not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time() + seconds)

    def _expired(self) -> RolloutTimeout:
        if self._turn_timeout is not None and self._turn_timeout.expired():
            return RolloutTimeout(
                f"turn {self._turn} took longer than the limit of {self._limits.turn_seconds:g} s (turn_seconds)"
            )
        return RolloutTimeout(
            f"the rollout took longer than the limit of {self._limits.rollout_seconds:g} s (rollout_seconds); "
            f"it was in turn {self._turn}"
        )


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)
