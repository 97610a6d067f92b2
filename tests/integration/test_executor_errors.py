"""What is told of a rollout that failed: the root cause, by its kind and its words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import openai
import pytest

from support.rollouts import FAILS, Played, ask, policies, says
from tokentape_executor.errors import (
    AgentFailed,
    AgentUnavailable,
    PolicyUnavailable,
    RolloutError,
    RolloutRefused,
    SidecarFailed,
    SidecarUnavailable,
    TapeLost,
)
from tokentape_executor.executor import (
    RolloutClient,
    Row,
)

if TYPE_CHECKING:
    from support.rollouts import Policies, Served

__all__ = ["policies"]


async def raise_timeout(_client: RolloutClient) -> None:
    async with asyncio.timeout(0.01):
        await asyncio.Event().wait()


async def cancel_itself(_client: RolloutClient) -> None:
    raise asyncio.CancelledError


async def fail_in_group(client: RolloutClient) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(client, "Go.", temperature=-1))


async def fail_wrapped(client: RolloutClient) -> None:
    try:
        await ask(client, "Go.", temperature=-1)
    except openai.APIError as error:
        raise LookupError("the agent's own words") from error


async def exit_as_a_tool_does(_client: RolloutClient) -> None:
    raise SystemExit(2)


async def fail_as_gym_does(_client: RolloutClient) -> None:
    raise AgentUnavailable("agent math: ConnectError")


async def fail_as_gym_does_in_a_group(_client: RolloutClient) -> None:
    raise ExceptionGroup("tools", [AgentUnavailable("agent math: ConnectError")])


async def raise_in_a_circle(_client: RolloutClient) -> None:
    error = ValueError("round")
    raise error from error


async def raise_group(_client: RolloutClient) -> None:
    raise ExceptionGroup("two tools", [ValueError("one"), KeyError("two")])


async def ask_another_server(_client: RolloutClient) -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 X\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    judge = openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)
    async with server, judge:
        await judge.models.list()


async def fail_at_engine(client: RolloutClient) -> None:
    await ask(client, "Go.")


async def ask_badly(client: RolloutClient) -> None:
    await ask(client, "Go.", temperature=-1)


async def ask_too_much(client: RolloutClient) -> None:
    await ask(client, "x " * 600)


async def ask_another_model(client: RolloutClient) -> None:
    await client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "Go."}])


async def ask_on_lost_tape(client: RolloutClient) -> None:
    sidecar = client.tape_id.partition(".")[0]
    url = str(client.base_url).replace(client.tape_id, f"{sidecar}.{'0' * 32}")
    await ask(client.copy(base_url=url), "Go.")


@pytest.mark.parametrize(
    ("fail", "kind", "told"),
    [
        (fail_at_engine, SidecarFailed, r"the bridge answered 500 \(engine_error\): .*out of memory"),
        (ask_badly, RolloutRefused, r"the bridge answered 400 \(invalid_value\): temperature"),
        (ask_too_much, RolloutRefused, r"the bridge answered 400 \(context_length_exceeded\): .*512"),
        (ask_another_model, RolloutRefused, r"the bridge answered 404 \(model_not_found\): .*gpt"),
        (ask_on_lost_tape, TapeLost, r"the bridge answered 404 \(not_found\)"),
        (fail_in_group, RolloutRefused, "temperature"),
        (fail_wrapped, RolloutRefused, "temperature"),
        (raise_group, AgentFailed, r"ExceptionGroup: two tools .*: ValueError: one; KeyError: 'two'$"),
        (raise_timeout, AgentFailed, "^TimeoutError"),
        (exit_as_a_tool_does, AgentFailed, "^SystemExit: 2$"),
        (fail_as_gym_does, AgentUnavailable, "^agent math: ConnectError$"),
        (fail_as_gym_does_in_a_group, AgentUnavailable, r"^agent math: ConnectError \(the agent raised ExceptionGroup"),
        (raise_in_a_circle, AgentFailed, "^ValueError: round$"),
        (cancel_itself, AgentFailed, "the agent cancelled itself"),
        (ask_another_server, AgentFailed, "^InternalServerError"),
    ],
)
async def test_what_an_agent_raises_says_what_went_wrong(
    policies: Policies, fail: Callable[[RolloutClient], Awaitable[None]], kind: type[RolloutError], told: str
) -> None:
    async def play(_task: Row, client: RolloutClient) -> float:
        await fail(client)
        return 1.0

    async with policies.serve(FAILS, repeat=True) as policy:
        with pytest.raises(kind, match=told) as caught:
            await Played(policy, play).rollout({})
        assert type(caught.value) is kind
        assert policy.engine.running == 0


async def test_a_dead_engine_is_told_as_unavailable_at_once(policies: Policies) -> None:
    async def play(_task: Row, client: RolloutClient) -> float:
        await ask(client, "Go.")
        policy.engine.die()
        await ask(client, "Go.")
        return 1.0

    async with policies.serve(says("fine"), repeat=True) as policy:
        with pytest.raises(PolicyUnavailable, match=r"the bridge answered 503 \(sidecar_unavailable\)") as caught:
            await Played(policy, play).rollout({})
    assert caught.value.retryable


async def test_a_bridge_that_is_not_there_is_told_as_unavailable(policies: Policies) -> None:
    async def play(_task: Row, client: RolloutClient) -> float:
        await ask(client, "Go.")
        return 1.0

    async with policies.serve() as policy:
        nobody = NoBridgeThere(policy)
        with pytest.raises(PolicyUnavailable, match="the bridge could not be reached: ConnectError"):
            await Played(nobody, play).rollout({})


class NoBridgeThere:
    """A policy whose bridge has gone."""

    model_name = "toy"
    api_key = "none"

    def __init__(self, policy: Served) -> None:
        self.tapes = policy.tapes

    async def bridge_url(self) -> str:
        return "http://127.0.0.1:9/v1"


async def test_an_unavailable_sidecar_is_named_and_not_what_the_agent_made_of_it(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokentape_executor.attempts.CLEANUP_SECONDS", 0.5)

    async def play(_task: Row, client: RolloutClient) -> float:
        await ask(client, "Go.")
        await policy.running.sidecar.stop(grace_seconds=0)
        raise ValueError("the model says nothing")

    async with policies.serve(says("fine")) as policy:
        with pytest.raises((SidecarUnavailable, TapeLost), match="what came of it: ValueError: the model") as caught:
            await Played(policy, play).rollout({})
    assert isinstance(caught.value.__cause__, AgentFailed)
