"""Scripted sidecars and bridges, all of them processes, for conversations over several calls.

Each sidecar always gives the same answer, in tokens that no tokenizer would choose, so that any re-encoding shows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from support.agent import TOOLS, Agent, Json
from support.sidecar_client import SidecarClient
from support.tokenizers import KINDS, TokenizerDirectory

if TYPE_CHECKING:
    from integration.conftest import Bridge, ServerProcess

ODD_CALL = '<tool_call>\n{"name": "ls" , "arguments":{"p" : "a",\r\n"q": [1.0, {"y": null, "x": true}]}}\n</tool_call>'
REASONED = "<think>\nhm\n</think>\n\nDone."


def model(kind: str) -> Json:
    eos = list(KINDS[kind].stop_token_ids)
    return {"name": "toy", "max_model_len": 8192, "vocab_size": 200_000, "eos_token_ids": eos}


def script(kind: str, *steps: Json) -> Json:
    """Always the same answer."""
    return {"model": model(kind), "calls": [{"steps": [*steps]}], "repeat": True}


def scripts(kind: str, odd: list[int]) -> dict[str, Json]:
    """By the name of the sidecar."""
    end = {"token_ids": [KINDS[kind].stop_token_ids[0]]}
    return {
        "text": script(kind, {"token_ids": odd}, end),
        "call": script(kind, {"text": ODD_CALL}, end),
        "reason": script(kind, {"text": REASONED}, end),
        "two": script(kind, {"text": "One.", "index": 0}, end, {"text": "Two.", "index": 1}, {**end, "index": 1}),
        "slow": script(kind, {"text": "Well"}, {"text": " then.", "delay_ms": 20_000}, end),
    }


SIDECARS = {"smollm2": ["text", "call", "two", "slow"], "qwen3": ["text", "call", "reason"]}


@dataclass(frozen=True, slots=True)
class Rig:
    """Sidecars with one tokenizer that each always give the same answer, and a bridge in front of all of them."""

    kind: str
    sidecars: dict[str, ServerProcess]
    bridge: Bridge

    @property
    def addresses(self) -> dict[str, str]:
        """Of each sidecar, by name."""
        return {name: sidecar.address for name, sidecar in self.sidecars.items()}


StartRig = Callable[[str], Rig]
OpenAgent = Callable[..., Awaitable[Agent]]


@pytest.fixture(scope="session")
def start_rig(tokenizer_directory: TokenizerDirectory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRig]:
    """Start the rig of a kind of tokenizer, or return the one that runs; at the end, no bridge may have failed."""
    from integration.conftest import Bridge, ServerProcess, scripted_sidecar_command  # noqa: PLC0415 - a conftest

    rigs: dict[str, Rig] = {}
    servers = ExitStack()

    def start_sidecar(content: Json, name: str, tokenizer: Path) -> ServerProcess:
        directory = tmp_path_factory.mktemp("sidecar")
        command = scripted_sidecar_command(directory, tokenizer, content, name, "127.0.0.1:0")
        return servers.enter_context(ServerProcess(command, directory))

    def start_bridge(sidecars: dict[str, ServerProcess]) -> Bridge:
        named = [f"{name}={sidecar.address}" for name, sidecar in sidecars.items()]
        options = [option for name in named for option in ("--sidecar", name)]
        command = ["tokentape-bridge", "--listen", "127.0.0.1:0", *options]
        return servers.enter_context(Bridge(command, tmp_path_factory.mktemp("bridge")))

    def start(kind: str) -> Rig:
        if kind not in rigs:
            directory = tokenizer_directory(kind)
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            # Ids of " international" that no tokenizer gives for it.
            odd = [i for part in (" inter", "national") for i in tokenizer.encode(part, add_special_tokens=False).ids]
            assert tokenizer.encode(" international", add_special_tokens=False).ids != odd
            sidecars = {name: start_sidecar(scripts(kind, odd)[name], name, directory) for name in SIDECARS[kind]}
            rigs[kind] = Rig(kind, sidecars, start_bridge(sidecars).wait_healthy())
        return rigs[kind]

    with servers:
        yield start
        for rig in rigs.values():
            assert "Traceback" not in rig.bridge.log
            assert "ERROR" not in rig.bridge.log


@pytest.fixture
async def open_agent(start_rig: StartRig) -> AsyncIterator[OpenAgent]:
    """Open a tape on a sidecar of a rig, and return an agent on it."""
    async with AsyncExitStack() as clients:

        async def open_on(kind: str, name: str, *, keep_reasoning: bool = False, **fields: Any) -> Agent:
            rig = start_rig(kind)
            client = await clients.enter_async_context(SidecarClient(rig.sidecars[name].address, name))
            tape = await client.open_tape(keep_reasoning=keep_reasoning)
            fields = {"return_token_ids": True, **({"tools": TOOLS} if name == "call" else {}), **fields}
            return Agent(rig.bridge.client, client, tape, **fields)

        yield open_on
