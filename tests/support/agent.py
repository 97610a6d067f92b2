"""An agent that talks to a bridge and is recorded on a tape."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from support.sidecar_client import OpenedTape, SidecarClient, prompts_on, sampled_on
from tokentape.v1 import tape_pb2, types_pb2

Json = dict[str, Any]

TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {"name": "ls", "parameters": {"type": "object", "properties": {"p": {"type": "string"}}}},
    }
]


def user(content: str) -> Json:
    return {"role": "user", "content": content}


class Agent:
    """Sends `messages` with each call; what it does to them in between is the test's."""

    def __init__(self, client: httpx.Client, sidecar: SidecarClient, tape: OpenedTape, **fields: Any) -> None:
        self.client = client
        self.messages = [user("Begin.")]
        self._sidecar = sidecar
        self._tape = tape
        self._fields = fields

    def post(self, messages: Sequence[Json] | None = None, **fields: Any) -> httpx.Response:
        """Send a call."""
        body = {"messages": self.messages if messages is None else list(messages), **self._fields, **fields}
        return self.client.post("/v1/chat/completions", json=body | {"metadata": {"tape_id": self._tape.tape_id}})

    def ask(self, messages: Sequence[Json] | None = None, **fields: Any) -> Json:
        """Send a call that must succeed; the answer's extension object and headers must agree."""
        response = self.post(messages, **fields)
        assert response.status_code == 200, response.text
        body = response.json()
        for key, value in body["tokentape"].items():
            told = str(value).lower() if isinstance(value, bool) else value
            assert response.headers.get(f"x-{key.replace('_', '-')}") == told
        return body

    def turn(self, **fields: Any) -> Json:
        """Send a call and take its answer, and a reply to that, into the history."""
        body = self.ask(**fields)
        self.messages += [message_of(body), reply_to(body)]
        return body

    @property
    def tape_id(self) -> str:
        """The tape's id."""
        return self._tape.tape_id

    async def start(self, messages: Sequence[Json]) -> asyncio.Task[httpx.Response]:
        """Send a call in the background; return when it is on the tape and has sampled something."""
        calls = len((await self.tape()).calls)

        async def send() -> httpx.Response:
            async with httpx.AsyncClient(base_url=self.client.base_url, timeout=30) as client:
                body = {"messages": messages, "metadata": {"tape_id": self.tape_id}}
                return await client.post("/v1/chat/completions", json=body)

        task = asyncio.create_task(send())
        async with asyncio.timeout(10):
            tape = await self.tape()
            while len(tape.calls) == calls or not tape.sampled(tape.calls[-1].call_id):
                await asyncio.sleep(0.02)
                tape = await self.tape()
        return task

    async def seal(self) -> None:
        """Seal the tape."""
        await self._sidecar.seal(self._tape)

    async def tape(self) -> Tape:
        """What the tape holds now."""
        return Tape(await self._sidecar.entries(self._tape))


class Tape:
    """The calls on a tape, by the tape alone."""

    def __init__(self, entries: list[tape_pb2.TapeEntry]) -> None:
        self.entries = entries
        self.calls = [entry.call_started for entry in entries if entry.HasField("call_started")]
        self.prompts = prompts_on(entries)

    def sampled(self, call_id: str, choice: int = 0) -> list[int]:
        """The completion of a call."""
        return sampled_on(self.entries, call_id, choice)

    @property
    def causes(self) -> list[str]:
        """Of each call why it has no parent, as the bridge's answers say it; "" where it has one."""
        return [
            ""
            if call.HasField("parent")
            else types_pb2.SplitCause.Name(call.split_cause).removeprefix("SPLIT_CAUSE_").lower()
            for call in self.calls
        ]

    def check_conserved(self) -> None:
        """A call with a parent has the parent's prompt and completion, then ids of its own: only those travelled."""
        for call in self.calls:
            prompt = self.prompts[call.call_id]
            assert len(prompt) == call.prompt_token_count
            if call.HasField("parent"):
                parent = call.parent
                before = self.prompts[parent.call_id] + self.sampled(parent.call_id, parent.choice)
                assert prompt == before + list(call.prompt_token_ids)
                assert 0 < len(call.prompt_token_ids) < len(prompt)


def message_of(body: Json, choice: int = 0) -> Json:
    """The answer as a client echoes it: all that it got."""
    return dict(body["choices"][choice]["message"])


def reply_to(body: Json, choice: int = 0, content: str = "Go on.") -> Json:
    """What an agent says next."""
    calls = body["choices"][choice]["message"].get("tool_calls")
    return {"role": "tool", "tool_call_id": calls[0]["id"], "content": content} if calls else user(content)


def outcome(body: Json) -> str | None:
    """Why the call began a new sample; `None` where it continued one."""
    extension = body["tokentape"]
    assert (extension["prefix"] == "kept") == (extension["parent_call_id"] is not None)
    assert (extension["split_cause"] is None) == (extension["prefix"] == "kept")
    return extension["split_cause"]
