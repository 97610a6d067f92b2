"""The examples for users, run on the real tokenizer: as programs, and as the classes that `tokentape-rollout` loads."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.rollouts import says_smol
from support.scripted import script
from tokentape_executor.cli.agents import load_agent
from tokentape_executor.executor import Rollout
from tokentape_executor.served_policy import open_policy

if TYPE_CHECKING:
    from integration.conftest import Bridge, ServerProcess, StartBridge, StartSidecar

    Served = tuple[ServerProcess, Bridge]

MODEL: dict[str, Any] = {"name": "smol", "max_model_len": 2048, "vocab_size": 49152, "eos_token_ids": [2]}
SECONDS = 40


@pytest.fixture
def serve(start_sidecar: StartSidecar, start_bridge: StartBridge) -> Any:
    """Serve these answers, in order, again and again."""

    def start(*answers: str) -> Served:
        sidecar = start_sidecar(script(*map(says_smol, answers), repeat=True, **MODEL), name="main")
        return sidecar, start_bridge(main=sidecar.address).wait_healthy()

    return start


async def run_program(file: Path, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(file), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(SECONDS):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return output.decode()


def addresses(served: Served) -> list[str]:
    sidecar, bridge = served
    return ["--sidecar", sidecar.address, "--bridge", f"http://{bridge.address}/v1"]


async def roll_out(served: Served, agent: Path, name: str, *tasks: dict[str, Any]) -> list[Rollout]:
    sidecar, bridge = served
    executor_class = load_agent(f"{agent}:{name}")
    async with open_policy(sidecar.address, bridge=f"http://{bridge.address}/v1") as policy:
        results = await executor_class(policy).rollouts(tasks, concurrency=1)
    assert all(isinstance(result, Rollout) for result in results), results
    return [result for result in results if isinstance(result, Rollout)]


async def test_the_calculator_runs_as_a_program(serve: Any, checkout: Path) -> None:
    output = await run_program(checkout / "executor/examples/calculator.py", *addresses(serve("It is 42.")))
    rewards = [line.partition(" sampled")[0] for line in output.splitlines()]
    assert rewards == [
        "What is 2 + 3? reward 0.0",
        "What is 12 * 12? reward 0.0",
        "What is 7 * (8 - 2)? reward 1.0",
    ]


async def test_the_calculator_computes_what_the_model_wants_in_one_sample(serve: Any, checkout: Path) -> None:
    served = serve("Let me see.\ncompute: 7 * (8 - 2)", "compute: 1 / 0", "compute: __import__('os')", "42")
    (rollout,) = await roll_out(
        served,
        checkout / "executor/examples/calculator.py",
        "Calculator",
        {"question": "7 * (8 - 2)?", "expected_answer": 42},
    )
    assert rollout.outcome.reward == 1.0
    (sample,) = rollout.trajectory.samples
    assert len(sample.action_ranges) == 4
    answers = "".join(bytes_of(sample.tokens, checkout))
    for told in ("user\n42<", "That cannot be computed: division by zero", "only numbers, + - * / and parentheses"):
        assert told in answers


async def test_the_calculator_answers_the_questions_beside_it(serve: Any, checkout: Path) -> None:
    examples = checkout / "executor/examples"
    questions = [json.loads(line) for line in (examples / "questions.jsonl").read_text().splitlines()]
    served = serve(*(str(question["expected_answer"]) for question in questions))
    rollouts = await roll_out(served, examples / "calculator.py", "Calculator", *questions)
    assert [rollout.outcome.reward for rollout in rollouts] == [1.0] * len(questions)


def bytes_of(token_ids: list[int], checkout: Path) -> str:
    from tokenizers import Tokenizer  # noqa: PLC0415

    tokenizer = Tokenizer.from_file(str(checkout / ".cache/SmolLM2-135M-Instruct/tokenizer.json"))
    return tokenizer.decode(token_ids, skip_special_tokens=False)


async def test_the_sub_agent_leaves_a_sample_of_its_own(serve: Any, checkout: Path) -> None:
    answers = ("It is on the Seine.", "I think it is Paris.", "Paris")
    output = await run_program(checkout / "executor/examples/sub_agent.py", *addresses(serve(*answers)))
    head, helper, main, receipt = output.splitlines()
    assert head == "reward 1.0, for all of these samples:"
    assert helper.startswith("  sample 0 (new_conversation): ")
    assert main.startswith("  sample 1 (new_conversation): ")
    assert (helper.count("("), main.count("(")) == (2, 3)
    account = json.loads(receipt.removeprefix("receipt: "))
    assert (account["samples"], account["calls"], account["splits"]) == (2, 3, {"new_conversation": 2})
    assert account["sampled"] == account["kept"] > 10


async def test_the_readmes_agent_runs(serve: Any, checkout: Path, tmp_path: Path) -> None:
    sidecar, bridge = serve("5", "It is 8.", "Yes, 9.")
    section = (checkout / "README.md").read_text().partition("\n## Any agent\n")[2].partition("\n## ")[0]
    code = section.partition("<<'EOF'\n")[2].partition("\nEOF\n")[0]
    assert 10 < len(code.splitlines()) <= 30
    program = tmp_path / "any_agent.py"
    program.write_text(code.replace("127.0.0.1:50051", sidecar.address).replace("127.0.0.1:8000", bridge.address))
    output = await run_program(program)
    first, second = output.splitlines()
    assert first.startswith("reward 1.0, sampled [(")
    assert second.startswith("reward 1.0, sampled [(")
    assert (first.count("("), second.count("(")) == (1, 2)
