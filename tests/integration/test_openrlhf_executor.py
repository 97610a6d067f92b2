"""OpenRLHF's way in on the scripted engine, with a real bridge: an agent file is loaded by its path and used."""

from __future__ import annotations

import asyncio
import copy
import pickle
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs] # it ships none
import pytest

from support.agent_file import load_as_openrlhf_does
from support.marked import Marked, marked
from support.on_script import FIVE, MODEL, SAMPLING, OnScript, load_tokenizer
from support.scripted import Json, call, script, tokens
from support.waiting import eventually
from tokentape_executor.errors import AgentFailed, NothingSampled, PolicyUnavailable, RolloutRefused
from tokentape_executor.executor import RolloutClient, Row, TapeExecutor
from tokentape_executor.settings import ExecutorSettings, OnFailure

__all__ = ["marked"]

SLOW = script(call({"text": "Well"}, {"text": " then.", "delay_ms": 20_000}, tokens(2)), repeat=True, **MODEL)


class Failing(TapeExecutor):
    """Asks once, and fails."""

    async def run(self, task: Row, client: RolloutClient) -> float:
        await client.chat.completions.create(model=client.model, messages=task["messages"])
        raise ValueError("boom")


class Idle(TapeExecutor):
    """Asks nothing, and is content."""

    async def run(self, task: Row, client: RolloutClient) -> float:
        return 1.0


class IdleExecutor(OnScript):
    agent = Idle


class FailingExecutor(OnScript):
    agent = Failing


@pytest.fixture(scope="module")
def hf_tokenizer(model_directory: Path) -> Any:
    return load_tokenizer(model_directory)


Use = Callable[..., OnScript]


@pytest.fixture
async def use(marked: Marked, checkout: Path) -> AsyncIterator[Use]:
    """Make an executor: of the example's agent, or of a class; afterwards it is shut down, and nothing is left."""
    example: Any = load_as_openrlhf_does(checkout / "executor" / "examples" / "openrlhf_agent.py")
    made: list[OnScript] = []

    class ExampleOnScript(OnScript):
        agent = example.AgentExecutor.agent

    def make(kind: type[OnScript] = ExampleOnScript, **settings: Any) -> OnScript:
        made.append(kind(ExecutorSettings(**settings)))
        return made[-1]

    yield make
    for executor in made:
        await asyncio.to_thread(executor.shutdown)
    assert marked.processes() == []


async def ask(
    executor: OnScript, hf_tokenizer: Any, engine: Json = FIVE, *, prompt: Any = "2 + 3?", **more: Any
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"label": "5", "sampling_params": SAMPLING, "max_length": 400, **more}
    return await executor.execute(prompt=prompt, hf_tokenizer=hf_tokenizer, llm_engine=engine, **arguments)


async def test_many_at_once_share_one_start(use: Use, hf_tokenizer: Any, marked: Marked) -> None:
    executor, params = use(), copy.deepcopy(SAMPLING)
    results = await asyncio.gather(*(ask(executor, hf_tokenizer, sampling_params=params) for _ in range(64)))

    assert (executor.starts, params) == (1, SAMPLING)
    assert len(marked.processes("tokentape.console import bridge")) == 2  # the bridge, and its leash
    answer = [*hf_tokenizer.encode("It is 5"), 2]
    for result in results:
        assert [result["observation_tokens"][start:end] for start, end in result["action_ranges"]] == [answer, answer]
        assert (result["reward"], result["truncated"]) == (1.0, False)
        assert result["extra_logs"] == results[0]["extra_logs"]
    assert (results[0]["extra_logs"]["attempts"], results[0]["extra_logs"]["failed"]) == (1.0, 0.0)


async def test_a_rendered_prompt_reaches_the_agent_once_with_its_system_message(use: Use, hf_tokenizer: Any) -> None:
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    rendered = hf_tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    executor = use()
    results = [await ask(executor, hf_tokenizer, prompt=prompt) for prompt in (rendered, conversation)]

    for result, prompt in zip(results, (rendered, conversation), strict=True):
        start, _ = result["action_ranges"][0]
        assert hf_tokenizer.decode(result["observation_tokens"][:start]) == rendered
        assert result["prompt"] == prompt


async def test_a_failed_rollout_raises_its_cause_after_its_retries(use: Use, hf_tokenizer: Any) -> None:
    with pytest.raises(AgentFailed, match=r"ValueError: boom.*3 attempts"):
        await ask(use(FailingExecutor, retries=2), hf_tokenizer)


async def test_a_placeholder_is_one_sampled_token_and_flagged(use: Use, hf_tokenizer: Any) -> None:
    good = await ask(use(), hf_tokenizer)
    result = await ask(use(FailingExecutor, retries=1, on_failure=OnFailure.PLACEHOLDER), hf_tokenizer)

    [(start, end)] = result["action_ranges"]
    assert end - start == 1
    assert result["observation_tokens"] == good["observation_tokens"][: start + 1]
    assert (result["reward"], result["scores"]) == (0.0, 0.0)
    assert list(result["extra_logs"]) == list(good["extra_logs"])
    assert (result["extra_logs"]["attempts"], result["extra_logs"]["failed"]) == (2.0, 1.0)


async def test_e11_an_agent_that_samples_nothing_fails_its_rollout(use: Use, hf_tokenizer: Any) -> None:
    with pytest.raises(NothingSampled, match=r"in 0 calls.*max_length, 400"):
        await ask(use(IdleExecutor), hf_tokenizer)
    result = await ask(use(IdleExecutor, on_failure=OnFailure.PLACEHOLDER), hf_tokenizer)
    [(start, end)] = result["action_ranges"]
    assert (end - start, result["reward"], result["extra_logs"]["failed"]) == (1, 0.0, 1.0)


async def test_a_prompt_that_fills_the_context_is_refused_and_not_cut(use: Use, hf_tokenizer: Any) -> None:
    with pytest.raises(RolloutRefused, match="context length"):
        await ask(use(), hf_tokenizer, prompt="Why? " * 40, max_length=64)


async def test_e14_an_executor_in_use_can_be_pickled_and_the_copy_starts_anew(use: Use, hf_tokenizer: Any) -> None:
    executor = use(FailingExecutor, retries=0, on_failure=OnFailure.PLACEHOLDER)
    await ask(executor, hf_tokenizer)
    twin = cloudpickle.loads(cloudpickle.dumps(executor))
    plain = pickle.loads(pickle.dumps(executor))
    try:
        assert (twin.sidecar_name, plain.sidecar_address, plain.policy_base_url) == ("", "", "")
        await ask(twin, hf_tokenizer)
        assert twin.starts == 2  # its own state went with it
        assert twin.sidecar_name not in {"", executor.sidecar_name}
        # Of one process, so that they share the bridge.
        assert twin.policy_base_url == executor.policy_base_url
        assert (await ask(executor, hf_tokenizer))["extra_logs"]["failed"] == 1.0
    finally:
        await asyncio.to_thread(twin.shutdown)
    assert (await ask(executor, hf_tokenizer))["extra_logs"]["failed"] == 1.0


@pytest.mark.parametrize("in_thread", [True, False])
async def test_e09_shutdown_ends_running_rollouts_and_a_later_one_starts_anew(
    use: Use, hf_tokenizer: Any, marked: Marked, *, in_thread: bool
) -> None:
    executor = use()
    running = [asyncio.create_task(ask(executor, hf_tokenizer, SLOW)) for _ in range(4)]
    await eventually(lambda: executor.policy_base_url, 30)
    await asyncio.sleep(0.5)
    began = time.monotonic()
    if in_thread:
        await asyncio.to_thread(executor.shutdown)
    else:
        executor.shutdown()
    errors = await asyncio.gather(*running, return_exceptions=True)

    assert time.monotonic() - began < 5.0
    assert [type(error) for error in errors] == [PolicyUnavailable] * 4, errors
    assert "shut down" in str(errors[0])
    executor.shutdown()
    assert marked.processes() == []
    assert (await ask(executor, hf_tokenizer))["reward"] == 1.0
    assert executor.starts == 2


async def test_shutdown_during_the_start_ends_it_and_leaves_nothing(
    use: Use, hf_tokenizer: Any, marked: Marked
) -> None:
    executor = use()
    starting = asyncio.create_task(ask(executor, hf_tokenizer))
    await eventually(lambda: executor.sidecar_name, 30)
    await asyncio.to_thread(executor.shutdown)
    with pytest.raises(Exception, match="shut down while it started"):
        await starting
    await eventually(lambda: not marked.processes(), 10)


@pytest.mark.parametrize(("end", "status"), [("exit", 0), ("kill", -signal.SIGKILL)])
async def test_the_end_of_the_process_leaves_nothing(
    marked: Marked, model_directory: Path, checkout: Path, end: str, status: int
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "support.on_script", str(model_directory), end), cwd=checkout / "tests"
    )
    assert await process.wait() == status
    await eventually(lambda: not marked.processes(), 10)
