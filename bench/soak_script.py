"""What a soak's sidecar replays, and the check that a completion is what the script must have produced.

Calls are served in the order in which they come, so a client does not know which of them it gets. Its tokens tell: each
token id holds the scripted call and the position in it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

CALLS = 100
_IDS_PER_CALL = 1000
_STEP_MS = 1000
"""How long a step takes, about."""


class Soaked(AssertionError):
    """Something that must not happen has happened."""


def token_id(call: int, position: int) -> int:
    return call * _IDS_PER_CALL + position + 1


def logprob(token: int) -> float:
    # Exact in 32 bits.
    return -(token % 911) / 64


class Script:
    """Calls of some seconds, each of other lengths and pauses."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.lengths = [chance.randint(3, 30) for _ in range(CALLS)]
        self._pauses = random.Random(seed + 1)

    def content(self) -> dict[str, Any]:
        """The script, in the format of sidecar/README.md."""
        model = {"name": "soak", "max_model_len": 100_000, "vocab_size": CALLS * _IDS_PER_CALL + 1}
        return {"model": model, "calls": [self._call(call) for call in range(CALLS)], "repeat": True}

    def _call(self, call: int) -> dict[str, Any]:
        ids = [token_id(call, position) for position in range(self.lengths[call])]
        steps: list[dict[str, Any]] = []
        while ids:
            count = self._pauses.randint(1, 6)
            step, ids = ids[:count], ids[count:]
            logprobs = [{str(token): logprob(token)} for token in step]
            delay = self._pauses.uniform(0, 2 * _STEP_MS)
            steps.append({"token_ids": step, "logprobs": logprobs, "delay_ms": delay})
        steps[-1]["finish_reason"] = "stop"
        return {"steps": steps}

    def check(self, token_ids: Sequence[int], logprobs: Sequence[float], *, whole: bool) -> None:
        """Raise `Soaked` unless these are the first tokens of a scripted call, or all of them where it is `whole`."""
        if not token_ids:
            if whole:
                raise Soaked("a call that stopped by itself has no tokens")
            return
        call, first = divmod(token_ids[0] - 1, _IDS_PER_CALL)
        expected = [token_id(call, position) for position in range(self.lengths[call])]
        if not whole:
            expected = expected[: len(token_ids)]
        if first or list(token_ids) != expected:
            raise Soaked(f"tokens lost or repeated: {list(token_ids)} of {expected}")
        if list(logprobs) != [logprob(token) for token in token_ids]:
            raise Soaked(f"log-probabilities of other tokens: {list(logprobs)} of {list(token_ids)}")
