"""What a rollout makes of NeMo Gym's answers, from an HTTP server in Gym's place."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from tokentape_executor.errors import AgentFailed
from tokentape_executor.executor import NemoGymExecutor
from tokentape_executor.nemo_gym import NemoGym
from tokentape_executor.processes import ChildProcess
from tokentape_executor.rollout import Outcome
from tokentape_executor.tape_client import TapeClient


async def run_answered(body: bytes, status: int = 200) -> Outcome:
    """Run one row at an agent that answers so."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        # Neither Gym's process nor a tape is needed to ask an agent that answers.
        gym = NemoGym(cast("ChildProcess", None), {"agent": f"http://{host}:{port}"}, "agent")
        return await NemoGymExecutor(cast("TapeClient", None), gym).run({}, "main.0")


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
        (b'{"response": {}, "id": 3}', r"NeMo Gym returned no reward, only \['id', 'response'\]"),
        (b'{"reward": null}', "no number as reward but None"),
        (b'{"reward": true}', "no number as reward but True"),
        (b'{"reward": "1"}', "no number as reward but '1'"),
    ],
)
async def test_an_answer_without_a_reward_fails_the_rollout_and_is_named(body: bytes, told: str) -> None:
    with pytest.raises(AgentFailed, match=told):
        await run_answered(body)


async def test_what_came_is_told_in_short() -> None:
    for body in (b"x" * 100_000, json.dumps({"reward": "x" * 100_000}).encode()):
        with pytest.raises(AgentFailed) as caught:
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
