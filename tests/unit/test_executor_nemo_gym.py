"""What a rollout makes of NeMo Gym's answers, from an HTTP server in Gym's place."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any, cast

import pytest

from tokentape_executor import nemo_gym
from tokentape_executor.errors import AgentFailed, RewardInvalid
from tokentape_executor.executor import Outcome, RolloutClient
from tokentape_executor.gym_executor import NemoGymExecutor
from tokentape_executor.nemo_gym import GymAgents
from tokentape_executor.policy import Policy
from tokentape_executor.reward import as_outcome

TAPE = "main." + "0" * 32


async def run_answered(body: bytes, status: int = 200) -> Outcome:
    """Run one row at an agent that answers so."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()

    async def directory() -> Mapping[str, str]:
        return {"agent": f"http://{host}:{port}"}

    gym = GymAgents(directory)
    # No policy is needed to ask an agent that answers.
    executor = NemoGymExecutor(cast("Policy", None), gym, default_agent="agent")
    async with server, RolloutClient.connect("http://127.0.0.1:9/v1", tape_id=TAPE, model="toy") as client:
        try:
            return as_outcome(await executor.run({}, client))
        finally:
            await gym.close()


@pytest.mark.parametrize(
    ("report", "reward", "truncated"),
    [
        ({"reward": 1, "response": {"incomplete_details": None}}, 1.0, False),
        ({"reward": 0.5, "response": {"incomplete_details": {"reason": "max_output_tokens"}}}, 0.5, True),
        ({"reward": 0, "response": None}, 0.0, False),
        ({"reward": 0, "response": "text"}, 0.0, False),
    ],
)
async def test_an_outcome_is_the_reward_and_whether_a_limit_was_reached(
    report: dict[str, Any], reward: float, *, truncated: bool
) -> None:
    assert await run_answered(json.dumps(report).encode()) == Outcome(reward, truncated, report)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"<html>hello</html>", "agent answered 200 without a JSON object: <html>hello</html>"),
        (b"\xff\xfe\xfa", "agent answered 200 without a JSON object: "),
        (b"", "agent answered 200 without a JSON object: "),
        (b"[1, 2]", r"agent answered 200 without a JSON object: \[1, 2\]"),
    ],
)
async def test_an_answer_that_is_no_object_fails_the_rollout_and_is_named(body: bytes, told: str) -> None:
    with pytest.raises(AgentFailed, match=told):
        await run_answered(body)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"response": {}, "id": 3}', r"NeMo Gym returned no reward, only \['id', 'response'\]"),
        (b'{"reward": null}', "not NoneType None"),
        (b'{"reward": true}', "not bool True"),
        (b'{"reward": "1"}', "not str '1'"),
        (b'{"reward": NaN}', "not float nan"),
    ],
)
async def test_e12_an_answer_without_a_reward_fails_the_rollout_and_is_named(body: bytes, told: str) -> None:
    with pytest.raises(RewardInvalid, match=told):
        await run_answered(body)


async def test_waiting_for_gym_to_come_back_is_no_part_of_the_patience_with_an_agent_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nemo_gym, "_GONE_SECONDS", 0.3)
    monkeypatch.setattr(nemo_gym, "_GONE_INTERVAL_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"http://127.0.0.1:{closed.getsockname()[1]}"
    lookups = 0

    async def directory() -> Mapping[str, str]:
        nonlocal lookups
        lookups += 1
        if lookups == 2:
            await asyncio.sleep(1.0)  # Gym starts again, and its agent listens a moment later
        return {"agent": gone if lookups < 4 else url}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 X\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = "http://127.0.0.1:{1}".format(*server.sockets[0].getsockname())
    gym = GymAgents(directory)
    async with server:
        assert await gym.run({"agent_ref": {"name": "agent"}}) == {}
    await gym.close()
    assert lookups == 4


async def test_what_came_is_told_in_short() -> None:
    for body in (b"x" * 100_000, json.dumps({"reward": "x" * 100_000}).encode()):
        with pytest.raises((AgentFailed, RewardInvalid)) as caught:
            await run_answered(body)
        assert len(str(caught.value)) < 1200


async def test_nested_errors_are_told_without_their_escapes() -> None:
    text = 'the prompt has "512" tokens\nno room'
    for _ in range(6):
        text = json.dumps({"detail": text})
    with pytest.raises(AgentFailed) as caught:
        await run_answered(text.encode(), 500)
    assert "\\" not in str(caught.value)
    assert 'the prompt has "512" tokens\nno room' in str(caught.value)


async def test_a_long_error_keeps_its_end_where_the_cause_is() -> None:
    with pytest.raises(AgentFailed, match=r"answered 500: outer.* \[…\] .*the cause$"):
        await run_answered(b"outer " + b"." * 50_000 + b" the cause", 500)


@pytest.mark.parametrize(("named", "asked"), [(None, "default"), ("other", "other")])
async def test_rows_that_name_no_agent_go_to_the_default(named: str | None, asked: str) -> None:
    async def directory() -> Mapping[str, str]:
        return {}

    gym = GymAgents(directory)
    executor = NemoGymExecutor(cast("Policy", None), gym, default_agent="default")
    row = {} if named is None else {"agent_ref": {"name": named}}
    async with RolloutClient.connect("http://127.0.0.1:9/v1", tape_id=TAPE, model="toy") as client:
        with pytest.raises(AgentFailed, match=f"has no agent '{asked}'"):
            await executor.run(row, client)
    await gym.close()
