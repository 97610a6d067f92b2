"""What a run's rollouts need, started and kept: sidecars, a bridge, and for Gym's agents NeMo Gym."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tokentape_executor.cli.arguments import RunOptions
from tokentape_executor.cli.bridge_gate import BridgeGate
from tokentape_executor.cli.own_sidecar import OwnSidecar, serving
from tokentape_executor.cli.parser import GYM
from tokentape_executor.cli.pool import PooledTapes
from tokentape_executor.cli.sidecar import Sidecar
from tokentape_executor.errors import ExecutorError, StartFailed
from tokentape_executor.nemo_gym import GymAgents
from tokentape_executor.node import NodeMember, NodeSpec
from tokentape_executor.reader_tokens import ReaderTokenFile
from tokentape_executor.services import ServiceGroup

Report = Callable[[str], object]
"""Takes what is being done now, in words."""


class PolicyGone(ExecutorError):
    """No sidecar serves any more, and none has come back."""


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """The policy of a run (see `policy.Policy`), of any number of sidecars."""

    tapes: PooledTapes
    model_name: str
    own: OwnSidecar | None
    gym: GymAgents | None
    """`None` where other agents run."""
    gate: BridgeGate
    patience_seconds: float
    api_key: str = field(repr=False)

    async def bridge_url(self) -> str:
        """Return the bridge's OpenAI base URL."""
        return await self.gate.url()

    async def keep(self) -> None:
        """Follow the sidecars, and start an own one again that dies, until none has served for too long.

        Raises `PolicyGone` then.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.tapes.follow())]
            if self.own is not None:
                (sidecar,) = self.tapes.sidecars.values()
                tasks.append(group.create_task(self.own.keep_running(sidecar)))
            await self.tapes.lost(self.patience_seconds)
            for task in tasks:
                task.cancel()
        reason = f": {self.own.problem}" if self.own is not None and self.own.problem else ""
        raise PolicyGone(f"no sidecar has served for {self.patience_seconds:g} s{reason}")


@contextlib.asynccontextmanager
async def running_policy(
    options: RunOptions, report: Report, sampled: Callable[[int], object]
) -> AsyncGenerator[RunPolicy]:
    """Start what the options ask for, yield it, and end it again. Raises `ExecutorError` where it does not start.

    `sampled` is called with the number of tokens that were just sampled.
    """
    async with contextlib.AsyncExitStack() as stack:
        services: list[Callable[[], None]] = []
        stack.push_async_callback(_stop, services)
        reader_tokens = None if options.reader_tokens is None else ReaderTokenFile(options.reader_tokens)
        own = await _own_sidecar(options, services, report)
        addresses = options.sidecars if own is None else (own.address,)
        sidecars = [await _connect(address, options, stack, report) for address in addresses]
        model_name = _check_alike(sidecars)
        node = None if options.bridge else await _join(options, sidecars, model_name, services, report)
        gate = BridgeGate(
            _always(options.bridge) if node is None else node.bridge_url,
            patience_seconds=options.settings.start_timeout_seconds,
        )
        stack.push_async_callback(gate.close)
        report("waiting for the bridge")
        for sidecar in sidecars:
            await gate.reaches(sidecar.name)
        gym = None if node is None or options.agent != GYM else await _gym(options, node, stack, report)
        yield RunPolicy(
            PooledTapes(sidecars, gate, sampled, reader_tokens),
            model_name,
            own,
            gym,
            gate,
            options.settings.start_timeout_seconds,
            options.bridge_key,
        )


async def _stop(services: Sequence[Callable[[], None]]) -> None:
    """Stop them all at the same time: together they may take seconds."""
    await asyncio.gather(*(asyncio.to_thread(stop) for stop in services))


async def _own_sidecar(options: RunOptions, services: list[Callable[[], None]], report: Report) -> OwnSidecar | None:
    """Start a sidecar where the options name a model."""
    if options.model is None:
        return None
    report(f"the sidecar is loading {options.model}")
    group = ServiceGroup(options.settings.log_directory)
    services.append(group.stop)
    own = OwnSidecar(serving(options.model, options.vllm_options), group, options.settings)
    await own.start()
    return own


async def _connect(address: str, options: RunOptions, stack: contextlib.AsyncExitStack, report: Report) -> Sidecar:
    report(f"waiting for the sidecar at {address}")
    sidecar = await Sidecar.connect(
        address,
        timeout_seconds=options.settings.start_timeout_seconds,
        time_to_live_seconds=options.settings.tape_time_to_live_seconds,
        access=options.access,
    )
    stack.push_async_callback(sidecar.channel.close)
    return sidecar


def _check_alike(sidecars: Sequence[Sidecar]) -> str:
    """Return the name of the model that they all serve. Raises `StartFailed` where they cannot serve as one policy."""
    names: dict[str, str] = {}
    for sidecar in sidecars:
        if sidecar.name in names:
            raise StartFailed(
                f"--sidecar: those at {names[sidecar.name]} and {sidecar.address} are both named {sidecar.name!r}; "
                "give each tokentape-sidecar a --name of its own"
            )
        names[sidecar.name] = sidecar.address
    models = sorted({sidecar.model.name for sidecar in sidecars})
    if len(models) > 1:
        raise StartFailed(f"--sidecar: they serve different models: {', '.join(models)}")
    return models[0]


async def _join(
    options: RunOptions,
    sidecars: Sequence[Sidecar],
    model_name: str,
    services: list[Callable[[], None]],
    report: Report,
) -> NodeMember:
    """Have a bridge, and for Gym's agents a Gym, of this run's own."""
    wants_gym = options.agent == GYM
    report("the bridge and NeMo Gym are starting" if wants_gym else "the bridge is starting")
    spec = NodeSpec.from_settings(
        options.settings,
        group=f"tokentape-rollout-{secrets.token_hex(8)}",
        policy_model_name=model_name if wants_gym else None,
        access=options.access,
    )
    node = await NodeMember.join(spec, {sidecar.name: sidecar.address for sidecar in sidecars})
    services.append(node.leave)
    await node.bridge_url()
    return node


async def _gym(options: RunOptions, node: NodeMember, stack: contextlib.AsyncExitStack, report: Report) -> GymAgents:
    """Return the agents of the node's Gym. Raises `StartFailed` where there is none of the name in the options."""
    report("waiting for NeMo Gym")
    names = await node.gym_agents()
    if options.settings.gym_agent not in names:
        raise StartFailed(
            f"--gym-agent (TOKENTAPE_GYM_AGENT): NeMo Gym has no agent {options.settings.gym_agent!r}; it has "
            f"{sorted(names)}"
        )
    gym = GymAgents(node.gym_agents)
    stack.push_async_callback(gym.close)
    return gym


def _always(url: str | None) -> Callable[[], Awaitable[str]]:
    """Return what gives the URL of a running bridge."""
    assert url is not None

    async def give() -> str:
        return url

    return give
