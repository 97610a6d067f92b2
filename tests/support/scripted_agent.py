"""An agent without a bridge: it drives a scripted sidecar itself, so that every id it sends is the test's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from support.scripted import Json, RunningSidecar, scripted_sidecar
from support.sidecar_client import Generated, SidecarClient, read_to_end
from tokentape.v1 import generation_pb2, types_pb2
from tokentape_executor.executor import Outcome, Rollout, RolloutClient, Row, TapeExecutor
from tokentape_executor.rollout_client import NO_KEY
from tokentape_executor.tape_client import TapeClient

Sampling = types_pb2.SamplingParameters
END = 2
"""The scripted model's end-of-sequence id."""


@dataclass
class Conversation:
    """An agent's side: what it sends, and what it got."""

    client: SidecarClient
    tape_id: str
    got: list[Generated] = field(default_factory=list[Generated])

    async def say(
        self,
        new_ids: Sequence[int],
        *,
        after: int | None = None,
        choice: int = 0,
        offset: int | None = None,
        cause: types_pb2.SplitCause.ValueType = types_pb2.SPLIT_CAUSE_UNSPECIFIED,
        sampling: Sampling | None = None,
    ) -> Generated:
        """Make a call; `after` is which earlier one it continues."""
        request = generation_pb2.GenerateRequest(
            prompt_token_ids=new_ids, tape_id=self.tape_id, split_cause=cause, sampling=sampling
        )
        if after is not None:
            request.parent.CopyFrom(
                types_pb2.CallReference(call_id=self.got[after].started.call_id, choice=choice, offset=offset)
            )
        self.got.append(await read_to_end(self.client.generation.Generate(request)))
        return self.got[-1]


@dataclass(frozen=True)
class NoBridge:
    """A policy whose agents drive the sidecar themselves."""

    tapes: TapeClient
    model_name: str = "toy"
    api_key: str = NO_KEY

    async def bridge_url(self) -> str:
        return "http://127.0.0.1:9/v1"  # where nobody is


Play = Callable[[Conversation], Awaitable[object]]


class Agent(TapeExecutor):
    """Runs a play, a function of the test's."""

    def __init__(self, running: RunningSidecar, play: Play, *, truncated: bool = False) -> None:
        super().__init__(NoBridge(TapeClient(running.client.channel, running.sidecar.name)))
        self._client = running.client
        self._play = play
        self._truncated = truncated

    async def run(self, task: Row, client: RolloutClient) -> Outcome:
        await self._play(Conversation(self._client, client.tape_id))
        return Outcome(1.0, self._truncated, {})


async def roll_out(*calls: Json, play: Play, truncated: bool = False, limit: int | None = None) -> Rollout:
    """Run one rollout of the play on this script; `truncated` is what the agent says, `limit` the context's tokens."""
    async with scripted_sidecar(*calls, eos_token_ids=[END], vocab_size=49152) as running:
        return await Agent(running, play, truncated=truncated).rollout({}, max_context_tokens=limit)
