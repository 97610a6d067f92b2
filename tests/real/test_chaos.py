"""Real NeMo Gym on a scripted engine while all that serves it is killed at fixed random moments: no rollout is lost."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from support.chaos import Chaos, check_attempts, check_nothing_left
from support.marked import Marked, marked
from support.mortal_services import mortal_services
from support.nodes import own_temporary_directory
from support.scripted import Json, call, script, tokens
from tokentape_executor.executor import FailedRollout, Rollout
from tokentape_executor.gym_executor import NemoGymExecutor
from tokentape_executor.nemo_gym import GymAgents
from tokentape_executor.settings import GYM_AGENT

__all__ = ["marked"]

pytestmark = pytest.mark.timeout(300)

COUNT = 64
END = 2
ANSWERS = (
    ("2 + 3 = 5,", " so it is \\boxed{5}."),
    ("Two and three", " are \\boxed{5}."),
    ("Let me count: 2, 3, 4,", " \\boxed{5}!"),
)
"""Each in its two steps."""
VICTIMS = {"bridge": 2, "sidecar": 2, "gym": 1, "gym server": 1, "keeper": 1}
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "What is 2 + 3?"}]},
    "question": "What is 2 + 3?",
    "expected_answer": "5",
}


def slowly(first: str, second: str) -> Json:
    """A call of a script that takes more than a second."""
    steps: tuple[Json, ...] = ({"text": first, "delay_ms": 100}, {"text": second, "delay_ms": 500})
    return call(*steps, tokens(END, finish="stop", delay_ms=600))


SCRIPT = script(
    *(slowly(*answer) for answer in ANSWERS),
    repeat=True,
    name="toy",
    vocab_size=49152,
    max_model_len=1024,
    eos_token_ids=[END],
)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    tmp_path_factory.getbasetemp()  # which would else be made in there
    with own_temporary_directory(monkeypatch) as directory:
        yield directory


@pytest.mark.usefixtures("root")
async def test_e13_64_rollouts_end_well_whatever_is_killed(
    marked: Marked, tmp_path: Path, model_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with mortal_services(SCRIPT, model_directory, tmp_path, with_gym=True) as served:
        chaos = Chaos.planned(13, marked, served.tapes, VICTIMS, seconds=2.0)
        gym = GymAgents(served.member.gym_agents)
        executor = NemoGymExecutor(served.policy, gym, default_agent=GYM_AGENT, retries=len(chaos.plan))
        async with chaos.reigns():
            results = await executor.rollouts([ROW] * COUNT, concurrency=16)
        await gym.close()
        chaos.report(results)
        check_attempts(chaos, results, COUNT)
        await served.check_tapes()
    check_nothing_left(chaos)
    check_tokens(results, Tokenizer.from_file(str(model_directory / "tokenizer.json")))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def check_tokens(results: Sequence[Rollout | FailedRollout], tokenizer: Tokenizer) -> None:
    """Each has the same prompt, and after it one whole answer of the script, each of which some rollout got."""
    answers = {
        (*(token_id for step in answer for token_id in tokenizer.encode(step, add_special_tokens=False).ids), END)
        for answer in ANSWERS
    }
    prompts: set[tuple[int, ...]] = set()
    sampled: set[tuple[int, ...]] = set()
    for result in results:
        assert isinstance(result, Rollout)
        assert result.outcome.reward == 1.0
        (sample,) = result.trajectory.samples
        ((start, end),) = sample.action_ranges
        assert end == len(sample.tokens)
        assert result.trajectory.receipt.kept == end - start
        assert sample.logprobs == [0.0] * start + [-1.0] * (end - start)
        prompts.add(tuple(sample.tokens[:start]))
        sampled.add(tuple(sample.tokens[start:]))
    assert sampled == answers
    (prompt,) = prompts
    assert "What is 2 + 3?" in tokenizer.decode(list(prompt), skip_special_tokens=False)
