"""Collecting the events of one call into whole completions.

Invariants: every token once, in order; `len(logprobs) == len(token_ids)`; each choice ends once, after its last token.
A stream that breaks one is an error of the call, never a shorter answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

from tokentape.choice_columns import TokenRun, Top
from tokentape.v1.generation_pb2 import GenerateResponse
from tokentape.v1.types_pb2 import Completion as FinishedEvent
from tokentape.v1.types_pb2 import TopLogprobs

CallEvent: TypeAlias = GenerateResponse.Started | TokenRun | FinishedEvent
"""One event of a call: it was accepted, tokens were sampled, a choice ended."""


class StreamError(Exception):
    """A sidecar's stream broke the contract."""


@dataclass(slots=True)
class Choice:
    """One completion, token by token: `token_ids`, `logprobs` and `top_logprobs` run in parallel."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[Sequence[tuple[int, float]]] = field(default_factory=list[Sequence[tuple[int, float]]])
    """Per token the most probable ones as (id, log-probability), best first; empty when none were asked for."""
    finished: FinishedEvent | None = None

    def add(self, run: TokenRun) -> None:
        """Append newly sampled tokens."""
        count = len(run.token_ids)
        if self.finished is not None or len(run.logprobs) != count:
            raise StreamError(f"{count} tokens with {len(run.logprobs)} log-probabilities, finished={self.finished}")
        self.token_ids.extend(run.token_ids)
        self.logprobs.extend(run.logprobs)
        self.top_logprobs.extend(by_position(run.top, count))

    def finish(self, event: FinishedEvent) -> FinishedEvent:
        """End this choice."""
        if self.finished is not None or event.token_count != len(self.token_ids):
            raise StreamError(f"a choice of {len(self.token_ids)} tokens ended with {event}, finished={self.finished}")
        self.finished = event
        return event


@dataclass(slots=True)
class Call:
    """One call's answer. `choices` has n, by index; all are finished once `collect` has returned it."""

    call_id: str
    prompt_token_count: int
    choices: list[Choice]
    started: GenerateResponse.Started = field(default_factory=GenerateResponse.Started)
    """Its first event: where they were asked for, it has the prompt's log-probabilities."""


async def collect(events: AsyncGenerator[CallEvent], choice_count: int) -> Call:
    """Read a call's `events` to their end, and close them in any case. Raises `StreamError` when a rule is broken."""
    async with aclosing(events):
        started = await read_started(events)
        # Not before: a count that the sidecar refuses may be any number.
        choices = [Choice() for _ in range(choice_count)]
        call = Call(started.call_id, started.prompt_token_count, choices, started)
        async for event in events:
            _apply(call, event)
    if any(choice.finished is None for choice in call.choices):
        raise StreamError("the stream ended before all choices did")
    return call


async def read_started(events: AsyncGenerator[CallEvent]) -> GenerateResponse.Started:
    """Return a call's first event, which says that it was accepted. Raises `StreamError` for any other."""
    first = await anext(events, None)
    if not isinstance(first, GenerateResponse.Started):
        raise StreamError(f"a call began with {type(first).__name__ if first else 'its end'}")
    return first


def _apply(call: Call, event: CallEvent) -> None:
    if isinstance(event, TokenRun):
        _choice(call, event.choice).add(event)
    elif isinstance(event, FinishedEvent):
        _choice(call, event.choice).finish(event)
    else:
        raise StreamError("a call began twice")


def _choice(call: Call, index: int) -> Choice:
    if index >= len(call.choices):
        raise StreamError(f"an event of choice {index}, where {len(call.choices)} were asked for")
    return call.choices[index]


def by_position(top: Top | TopLogprobs | None, count: int) -> Sequence[Sequence[tuple[int, float]]]:
    """Return the most probable tokens of each of `count` positions. Raises `StreamError` where they are fewer."""
    if top is None or not top.k:
        return [()] * count
    if len(top.token_ids) != count * top.k or len(top.logprobs) != count * top.k:
        raise StreamError(f"{len(top.token_ids)} most probable tokens for {count} positions of {top.k}")
    pairs = list(zip(top.token_ids, top.logprobs, strict=True))
    return [pairs[start : start + top.k] for start in range(0, len(pairs), top.k)]
