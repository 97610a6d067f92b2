"""What a bench asks of a server, and what its clients read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Load:
    """What to ask: `streams` at once, each `rounds` times."""

    kind: str
    """One of `CLIENTS`."""
    address: str
    streams: int
    rounds: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 256
    model: str = "bench"
    processes: int = 1
    site: str = ""
    """A directory with packages that this client needs besides."""
    give_up_seconds: float = 240.0


@dataclass
class Readings:
    """What clients saw; times in seconds of the machine's monotonic clock."""

    began: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    bytes_received: int = 0
    first: list[float] = field(default_factory=list[float])
    """From sending the request to its first token, for each."""
    gaps: list[float] = field(default_factory=list[float])
    """Between one arrival of tokens and the next of the same request."""
    messages: int = 0
    rates: list[float] = field(default_factory=list[float])
    """Tokens a second of each request, from its first arrival to its last."""

    def request(self, server: str, sent: float, arrivals: list[float], tokens: int, asked: int) -> None:
        """Take one request's arrivals. Raises RuntimeError where it has not as many tokens as were asked for."""
        if tokens != asked:
            raise RuntimeError(f"{server}: {tokens} tokens with log-probabilities of {asked}")
        self.tokens += tokens
        self.messages += len(arrivals)
        self.first.append(arrivals[0] - sent)
        self.gaps.extend(np.diff(arrivals).tolist())
        if len(arrivals) > 1:
            # What came with the first arrival took no time that is known.
            self.rates.append((tokens - tokens / len(arrivals)) / (arrivals[-1] - arrivals[0]))

    def figures(self) -> dict[str, float]:
        """Return the readings as a row of a table has them."""
        seconds = self.ended - self.began
        milliseconds = 1e3
        gaps = self.gaps or [0.0]
        return {
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            **self.medians(),
            "first_token_ms_p99": float(np.percentile(self.first, 99)) * milliseconds,
            "gap_ms_p99": float(np.percentile(gaps, 99)) * milliseconds,
            "slowest_tokens_per_second": min(self.rates, default=0.0),
            "bytes_per_token": self.bytes_received / self.tokens,
            "tokens_per_message": self.tokens / self.messages,
        }

    def medians(self) -> dict[str, float]:
        """Return the time to the first token, and between one arrival and the next, in ms."""
        return {
            "first_token_ms_p50": float(np.percentile(self.first, 50)) * 1e3,
            "gap_ms_p50": float(np.percentile(self.gaps or [0.0], 50)) * 1e3,
        }

    @classmethod
    def joined(cls, parts: list[Readings]) -> Readings:
        """Return the readings of all processes as one."""
        return cls(
            began=min(part.began for part in parts),
            ended=max(part.ended for part in parts),
            tokens=sum(part.tokens for part in parts),
            bytes_received=sum(part.bytes_received for part in parts),
            first=[value for part in parts for value in part.first],
            gaps=[value for part in parts for value in part.gaps],
            messages=sum(part.messages for part in parts),
            rates=[value for part in parts for value in part.rates],
        )


class Client(Protocol):
    """One stream after the other, over a connection of its own or a shared one."""

    def __init__(self, load: Load, shared: Any) -> None: ...

    @staticmethod
    def shared(load: Load) -> Any:
        """Return what all clients of a process share."""
        ...

    async def request(self, prompt: list[int], readings: Readings) -> None:
        """Ask once, and read the answer to its end."""
        ...


def rounds(streams: int) -> int:
    """Return how often each stream asks: enough for a second or two, and for a median, at any number of them."""
    return {1: 40, 64: 3, 256: 3}.get(streams, 2)


def tokens_of(streams: int, new_tokens: int) -> int:
    """Return how many tokens a request samples: of a lone stream's the first is what counts."""
    return min(new_tokens, 24) if streams == 1 else new_tokens
