"""What a keeper keeps running: the bridge, NeMo Gym behind it, and the bridge's knowledge of the members' sidecars."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import cast

import httpx

from tokentape.access import access_options
from tokentape_executor.node.attach import AttachPlan, policy_address, policy_base_url
from tokentape_executor.node.bridge import BridgePlan, sidecar_states
from tokentape_executor.node.gym import GymPlan
from tokentape_executor.node.logs import BRIDGE, GYM, bound_logs
from tokentape_executor.node.membership import Membership
from tokentape_executor.node.places import Place
from tokentape_executor.node.ports import Address, reserved
from tokentape_executor.node.spec import AttachedGym, GymSpec, NodeSpec
from tokentape_executor.node.supervised import HEALTH_SECONDS, Supervised

_SERVING = "SERVING"
_LOOK_INTERVAL_SECONDS = 0.1


async def keep_services(place: Place, spec: NodeSpec, members: Membership) -> None:
    """Keep bridge and Gym running, and tell `members` of them, until cancelled.

    Raises `StartFailed` where one of them does not start for the first time.
    """
    try:
        async with _address(spec) as address, asyncio.TaskGroup() as tasks:
            bridge_ran = asyncio.Event()
            tasks.create_task(_keep_bridge(place, spec, address, members, bridge_ran))
            tasks.create_task(_follow_sidecars(address, members))
            tasks.create_task(bound_logs(_logs(place, spec)))
            await bridge_ran.wait()
            if spec.gym is not None:
                tasks.create_task(_keep_gym(place, spec, spec.gym, f"http://{address}/v1", members))
    except ExceptionGroup as group:
        raise _first(group) from None


@contextlib.asynccontextmanager
async def _address(spec: NodeSpec) -> AsyncGenerator[Address]:
    """Reserve the address of the bridge: any, or the one that a running Gym calls."""
    if isinstance(spec.gym, AttachedGym):
        with policy_address(spec.gym, await policy_base_url(spec.gym)) as address:
            yield address
    else:
        with reserved() as address:
            yield address


async def _keep_bridge(place: Place, spec: NodeSpec, address: Address, members: Membership, ran: asyncio.Event) -> None:
    def publish(url: str | None, problem: str) -> None:
        members.update(bridge_url=url, bridge_problem=problem, served=())
        members.sidecars_changed.set()
        if url is not None:
            ran.set()

    log_file = _logs(place, spec) / BRIDGE
    options = [*access_options(spec.access), *spec.bridge_options]
    plan = BridgePlan(place, address, options, log_file, spec.start_timeout_seconds)
    await Supervised("bridge", plan.running, publish).run()


async def _keep_gym(
    place: Place, spec: NodeSpec, gym: GymSpec | AttachedGym, base_url: str, members: Membership
) -> None:
    def publish(agents: Mapping[str, str] | None, problem: str) -> None:
        members.update(agents=agents, gym_problem=problem)

    if isinstance(gym, AttachedGym):
        plan = AttachPlan(gym, await policy_base_url(gym))
    else:
        plan = GymPlan(gym, base_url, _logs(place, spec) / GYM, spec.start_timeout_seconds)
    await Supervised("NeMo Gym", plan.running, publish).run()


async def _follow_sidecars(address: Address, members: Membership) -> None:
    """Find out which of the members' sidecars the bridge knows, until cancelled; asks only while one is missing."""
    async with httpx.AsyncClient(timeout=HEALTH_SECONDS, trust_env=False) as http:
        while True:
            if members.state.bridge_url is None or members.sidecars.keys() <= set(members.state.served):
                members.sidecars_changed.clear()
                await members.sidecars_changed.wait()
                continue
            with contextlib.suppress(httpx.HTTPError, ValueError):
                states, problem = await sidecar_states(http, address)
                _publish_served(members, states, problem)
            await asyncio.sleep(_LOOK_INTERVAL_SECONDS)


def _publish_served(members: Membership, states: Mapping[str, str], problem: str) -> None:
    serving = [name for name, state in states.items() if state == _SERVING]
    served = tuple(name for name in members.sidecars if name in serving or name in members.state.served)
    missing = "; ".join(f"{name}: {states[name]}" for name in members.sidecars if name in states and name not in served)
    told = problem or missing
    if (served, told) != (members.state.served, members.state.sidecar_problem):
        members.update(served=served, sidecar_problem=told)


def _logs(place: Place, spec: NodeSpec) -> Path:
    return spec.log_directory or place.logs


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error in `group` that is none itself."""
    error = group.exceptions[0]
    return _first(cast("ExceptionGroup[Exception]", error)) if isinstance(error, ExceptionGroup) else error
