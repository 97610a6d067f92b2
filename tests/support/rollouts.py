"""Rollouts against a real bridge process, in front of scripted sidecars that come and go with the tests."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import httpx
import pytest
from openai.types.chat import ChatCompletion
from tokenizers import Tokenizer

from support.scripted import TOY_TOKENIZER, Json, RunningSidecar, call, script, sidecar_on, tokens
from support.sidecar_client import SidecarClient
from tokentape_executor.executor import Outcome, RolloutClient, Row, TapeExecutor
from tokentape_executor.rollout_client import NO_KEY
from tokentape_executor.tape_client import TapeClient
from tokentape_sidecar.engine import EngineCall, Sink
from tokentape_sidecar.errors import EngineDead
from tokentape_sidecar.script import Script
from tokentape_sidecar.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from integration.conftest import Bridge

END = 257
"""What ends a turn: of the toy tokenizer's two special tokens the second."""
MODEL: dict[str, Any] = {"name": "toy", "max_model_len": 512, "vocab_size": 49152, "eos_token_ids": [END]}


def says(text: str, *, delay_ms: int = 0) -> Json:
    """A call of a script that answers so."""
    return call({"text": text, "delay_ms": delay_ms}, tokens(END, finish="stop"))


def says_smol(text: str) -> Json:
    """A call of a script that answers so in SmolLM2's tokens."""
    return call({"text": text}, tokens(2, finish="stop"))


def slow() -> Json:
    """A call of a script that says something, and then nothing for long."""
    return call({"text": "Well"}, {"text": " then", "delay_ms": 60_000}, tokens(END, finish="stop"))


FAILS = call({"error": "out of memory"})
"""A call of a script that fails at the engine."""


class WatchedEngine(ScriptedEngine):
    """A scripted engine that tells what runs on it, and can die."""

    def __init__(self, script: Script, tokenizer_directory: Path) -> None:
        super().__init__(script, tokenizer_directory)
        self._death = asyncio.Event()

    @property
    def running(self) -> int:
        """How many calls it works on."""
        return len(self._running)

    def die(self) -> None:
        """Be of no use any more."""
        self._death.set()

    async def submit(self, call: EngineCall, sink: Sink) -> None:
        if self._death.is_set():
            raise EngineDead("the engine is dead")
        await super().submit(call, sink)

    async def wait_dead(self) -> None:
        await self._death.wait()


@dataclass(frozen=True)
class Served:
    """A policy (`tokentape_executor.policy`), and what serves it."""

    tapes: TapeClient
    model_name: str
    url: str
    engine: WatchedEngine
    running: RunningSidecar
    api_key: str = NO_KEY

    async def bridge_url(self) -> str:
        return self.url

    async def refuses(self, tape_id: str) -> str:
        """What the sidecar says to one more call on the tape: of a sealed one, that it is sealed."""
        return await refusal(self.running.client, tape_id)


async def refusal(sidecar: SidecarClient, tape_id: str) -> str:
    """What the sidecar says to one more call on the tape, which it must refuse."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await sidecar.generate([5], tape_id=tape_id)
    return str(refused.value.details())


class Policies:
    """Scripted policies behind one bridge."""

    def __init__(self, bridge: Bridge, table: Path, tokenizer: Path) -> None:
        """`table` is the bridge's sidecar file, `tokenizer` a directory with a tokenizer and a chat template."""
        self._bridge = bridge
        self._table = table
        self._tokenizer = tokenizer
        self._names = (f"s{number}" for number in itertools.count())
        self._listed: dict[str, str] = {}

    @asynccontextmanager
    async def serve(self, *calls: Json, repeat: bool = False) -> AsyncGenerator[Served]:
        """Serve a script to rollouts."""
        name = next(self._names)
        content = script(*calls, repeat=repeat, **MODEL)
        engine = WatchedEngine(Script.model_validate(content), self._tokenizer)
        async with sidecar_on(engine, name=name) as running:
            self._list({**self._listed, name: running.sidecar.address})
            await self._until_served(name)
            url = f"http://{self._bridge.address}/v1"
            yield Served(TapeClient(running.client.channel, name), "toy", url, engine, running)
            self._list({other: address for other, address in self._listed.items() if other != name})
            await self._until_served(name, "")  # a stopping sidecar would wait for the bridge to leave

    def prompt_ids(self, *messages: Json) -> list[int]:
        """The ids of a chat's prompt."""
        answer = self._bridge.client.post("/tokenize", json={"messages": messages, "model": "words"})
        return answer.json()["tokens"]

    def _list(self, sidecars: dict[str, str]) -> None:
        self._listed = sidecars
        new = self._table.with_suffix(".new")
        new.write_text(json.dumps(sidecars))
        new.rename(self._table)

    async def _until_served(self, name: str, state: str = "SERVING") -> None:
        async with asyncio.timeout(20), httpx.AsyncClient(base_url=f"http://{self._bridge.address}") as http:
            while (await http.get("/health")).json()["sidecars"].get(name, "") != state:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policies]:
    """One bridge for all policies, and a sidecar that lends it the tokenizer: a token per byte."""
    from integration.conftest import Bridge, ServerProcess, scripted_sidecar_command  # noqa: PLC0415 - a conftest

    directory = tmp_path_factory.mktemp("policies")
    write_toy_chat(directory)
    table = directory / "sidecars.json"
    table.write_text("{}")
    words = script(says("words"), repeat=True, **{**MODEL, "name": "words"})
    command = scripted_sidecar_command(directory, directory, words, "words", "127.0.0.1:0")
    with ServerProcess(command, directory) as sidecar:
        options = ["--sidecar", f"words={sidecar.address}", "--sidecar-file", str(table)]
        with Bridge(["tokentape-bridge", "--listen", "127.0.0.1:0", *options], directory) as bridge:
            yield Policies(bridge.wait_healthy(), table, directory)


def write_toy_chat(directory: Path) -> None:
    """Write the toy tokenizer with special tokens and a chat template, which is small and quick to load."""
    tokenizer = Tokenizer.from_file(str(TOY_TOKENIZER / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


Play = Callable[[Row, RolloutClient], Awaitable[Any]]


class Played(TapeExecutor):
    """Runs a play, a function of the test's; `tapes` are those of its rollouts, in order."""

    def __init__(self, policy: Any, play: Play, **options: Any) -> None:
        super().__init__(policy, **options)
        self._play = play
        self.tapes: list[str] = []

    async def run(self, task: Row, client: RolloutClient) -> Outcome | float:
        self.tapes.append(client.tape_id)
        return await self._play(task, client)


async def ask(client: RolloutClient, *texts: str, **options: Any) -> str:
    """Ask the model once; `texts` are the user's messages and, between them, the model's."""
    roles = itertools.cycle(("user", "assistant"))
    messages: list[Any] = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    create: Any = client.chat.completions.create  # whose overloads know no unknown options
    reply: ChatCompletion = await create(model=client.model, messages=messages, **options)
    return reply.choices[0].message.content or ""


async def asks_once(_task: Row, client: RolloutClient) -> float:
    """A play that is worth 1."""
    await ask(client, "Go.")
    return 1.0


async def fails(_task: Row, _client: RolloutClient) -> float:
    """A play that never gets to ask."""
    raise ValueError("no")


class Batch:
    """Eight tasks: 3 raises, 5's call fails at the engine, 6 has no reward; the rest is fine.

    Calls come in a fixed order, 5's last, and nothing fails before all were made, so that the script fits.
    """

    ORDER = (0, 1, 2, 3, 4, 6, 7, 5)
    SCRIPT = (*(says("fine") for _ in ORDER[:-1]), FAILS)
    TASKS = tuple({"number": number, "prompt": f"task {number}"} for number in range(8))

    def __init__(self) -> None:
        self._turns = {number: asyncio.Event() for number in self.ORDER}
        self._turns[self.ORDER[0]].set()
        self._all_called = asyncio.Event()

    async def play(self, task: Row, client: RolloutClient) -> Any:
        number: int = task["number"]
        await self._turns[number].wait()
        try:
            await ask(client, task["prompt"])
        finally:
            following = self.ORDER[self.ORDER.index(number) + 1 :]
            self._turns[following[0]].set() if following else self._all_called.set()
        await self._all_called.wait()
        if number == 3:
            raise ValueError("no such tool")
        return None if number == 6 else number / 10
