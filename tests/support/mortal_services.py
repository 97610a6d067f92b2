"""What chaos tests kill: a node, and before it a scripted sidecar that is started again, whose tapes are followed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from support.rollouts import refusal
from support.scripted import Json, scripted_arguments
from support.sidecar_client import SidecarClient
from tokentape.v1 import tape_pb2, types_pb2
from tokentape_executor.cli.own_sidecar import OwnSidecar
from tokentape_executor.cli.sidecar import Sidecar
from tokentape_executor.node import NodeMember, NodePolicy, NodeSpec
from tokentape_executor.services import ServiceGroup
from tokentape_executor.settings import ExecutorSettings
from tokentape_executor.tape_client import NO_OPTIONS, OpenedTape, TapeClient, TapeOptions


class FollowedTapes(TapeClient):
    """Tapes that tell what is sampled on them just now."""

    opened: list[str]
    """The ids of all tapes."""
    sampling: set[str]
    """Calls that have sampled a token and have not ended, on tapes that were opened after the last kill."""
    kill_count: int

    @classmethod
    def of(cls, sidecar: Sidecar) -> FollowedTapes:
        tapes = cls(sidecar.channel, sidecar.name, time_to_live_seconds=60.0)
        tapes.opened, tapes.sampling, tapes.kill_count = [], set(), 0
        return tapes

    async def open(
        self,
        *,
        max_context_tokens: int | None = None,
        sampling_policy: types_pb2.SamplingParameters | None = None,
        options: TapeOptions = NO_OPTIONS,
    ) -> OpenedTape:
        tape = await super().open(
            max_context_tokens=max_context_tokens, sampling_policy=sampling_policy, options=options
        )
        self.opened.append(tape.tape_id)
        return tape

    async def watch(self, tape: OpenedTape, *, from_sequence: int = 0) -> AsyncGenerator[tape_pb2.TapeEntry]:
        calls: set[str] = set()
        kill_count = self.kill_count
        try:
            async with contextlib.aclosing(super().watch(tape, from_sequence=from_sequence)) as entries:
                async for entry in entries:
                    if entry.HasField("tokens_sampled") and self.kill_count == kill_count:
                        calls.add(entry.tokens_sampled.call_id)
                        self.sampling.add(entry.tokens_sampled.call_id)
                    self.sampling -= {entry.choice_finished.call_id, entry.call_failed.call_id}
                    yield entry
        finally:
            self.sampling -= calls

    def note_kill(self) -> None:
        """What samples now counts no longer."""
        self.kill_count += 1
        self.sampling.clear()


@dataclass(frozen=True, slots=True)
class Services:
    """They, running."""

    member: NodeMember
    tapes: FollowedTapes
    policy: NodePolicy
    address: str
    logs: Path

    async def check_tapes(self) -> None:
        """Every tape is sealed, or gone; no call runs."""
        async with SidecarClient(self.address, self.tapes.sidecar_name) as client:
            for tape_id in self.tapes.opened:
                words = await refusal(client, tape_id)
                assert "is sealed" in words or "there is no tape" in words, words


@asynccontextmanager
async def mortal_services(
    script: Json, tokenizer: Path, directory: Path, *, with_gym: bool = False
) -> AsyncGenerator[Services]:
    """Start them; on leaving, end them, and check that nothing ran or went wrong in there."""
    settings = ExecutorSettings(log_directory=directory / "logs", start_timeout_seconds=90.0)
    group = ServiceGroup(settings.log_directory)
    try:
        own = OwnSidecar(scripted_arguments(script, directory, tokenizer), group, settings)
        await own.start()
        sidecar = await Sidecar.connect(own.address, timeout_seconds=30, time_to_live_seconds=60)
        keeping = [
            asyncio.create_task(sidecar.follow(lambda: None)),
            asyncio.create_task(own.keep_running(sidecar)),
        ]
        model = sidecar.model.name
        spec = NodeSpec.from_settings(settings, group="chaos", policy_model_name=model if with_gym else None)
        member = await NodeMember.join(spec, {sidecar.name: own.address})
        try:
            tapes = FollowedTapes.of(sidecar)
            yield Services(member, tapes, NodePolicy(tapes, model, member), own.address, directory / "logs")
            assert own.problem == ""
        finally:
            await asyncio.to_thread(member.leave)
            for task in keeping:
                task.cancel()
            ended = await asyncio.gather(*keeping, return_exceptions=True)
            await sidecar.channel.close()
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
    finally:
        await asyncio.to_thread(group.stop)
    assert "stopping; 0 calls are running" in (directory / "logs" / "sidecar.log").read_text()
    for name in ("sidecar", "bridge"):
        log = (directory / "logs" / f"{name}.log").read_text()
        assert "Traceback" not in log, log
        assert " ERROR " not in log, log
