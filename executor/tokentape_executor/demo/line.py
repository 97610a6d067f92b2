"""The demo's line of processes: a sidecar with vLLM, a bridge, NeMo Gym; and rollouts through all of them.

Sidecar and node belong to one `ServiceGroup`: stopping it ends them all, and so does the death of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path

from tokentape.channel import dial
from tokentape_executor.demo.steps import Steps
from tokentape_executor.gym_executor import NemoGymExecutor
from tokentape_executor.limits import RolloutLimits
from tokentape_executor.nemo_gym import GymAgents
from tokentape_executor.node import NodeMember, NodePolicy, NodeSpec
from tokentape_executor.processes import ChildProcess
from tokentape_executor.services import ServiceGroup
from tokentape_executor.settings import ExecutorSettings
from tokentape_executor.tape_client import TapeClient

_SIDECAR = "main"
_LOGS = ("sidecar", "node", "bridge", "nemo_gym")
_VLLM_OPTIONS = ("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "2048")
_VLLM_ENVIRONMENT = {
    # Without compiling, the first token comes after a third of a second and not after most of a minute.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
}
_STOP_SECONDS = 2.0
"""How long the sidecar may take to stop vLLM."""


@dataclass(frozen=True, slots=True)
class Line:
    """Where the processes find what they need."""

    model: Path
    """The checkpoint that vLLM serves, with its tokenizer."""
    logs: Path
    """The directory of the processes' log files. Those of an earlier run are replaced."""

    @contextlib.asynccontextmanager
    async def started(self, group: ServiceGroup, steps: Steps) -> AsyncGenerator[NemoGymExecutor]:
        """Start the processes as members of `group` and yield what runs rollouts through them.

        Raises `StartFailed`. Leaves the processes running: whoever made `group` stops it.
        """
        for name in _LOGS:
            group.log_file(name).unlink(missing_ok=True)
        settings = replace(ExecutorSettings.from_environment(), log_directory=self.logs)
        with steps.step("vLLM is loading the model", "vLLM has loaded the model; the sidecar serves it"):
            sidecar_address = await self._start_sidecar(group, settings)
        spec = NodeSpec.from_settings(settings, group=f"demo {secrets.token_hex(8)}", policy_model_name=str(self.model))
        with steps.step("the bridge is starting", "the bridge serves the OpenAI API"):
            member = await NodeMember.join(spec, {_SIDECAR: sidecar_address})
            await asyncio.to_thread(group.add_stop, member.leave)
            await member.bridge_url()
        with steps.step("NeMo Gym is starting its servers", "NeMo Gym has its agent, model and verifier servers up"):
            await member.gym_agents()
        gym = GymAgents(member.gym_agents)
        async with dial(sidecar_address) as channel:
            yield NemoGymExecutor(
                NodePolicy(TapeClient(channel, _SIDECAR), str(self.model), member),
                gym,
                default_agent=settings.gym_agent,
                limits=RolloutLimits.from_settings(settings),
            )
        await gym.close()

    async def _start_sidecar(self, group: ServiceGroup, settings: ExecutorSettings) -> str:
        """Start the sidecar and return its address once it serves."""
        ready_file = group.directory / "sidecar.ready"
        process = ChildProcess.start(
            "sidecar",
            [
                *(sys.executable, "-P", "-c", "from tokentape.console import sidecar; sidecar()"),
                *("--model", str(self.model), "--name", _SIDECAR, "--grace-seconds", "1"),
                *("--listen", "127.0.0.1:0", "--ready-file", str(ready_file)),
                *("--", *_VLLM_OPTIONS),
            ],
            log_file=group.log_file("sidecar"),
            environment={**os.environ, **_VLLM_ENVIRONMENT},
            grace_seconds=_STOP_SECONDS,
        )
        group.add(process)
        return await process.wait_for_ready_file(ready_file, timeout_seconds=settings.start_timeout_seconds)
