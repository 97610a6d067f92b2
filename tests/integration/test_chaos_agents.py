"""Agents of three calls while what serves them is killed at fixed random moments: every rollout comes to its end."""

from __future__ import annotations

import logging
from collections.abc import Generator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from support.chaos import Chaos, check_attempts, check_nothing_left
from support.marked import Marked, marked
from support.mortal_services import mortal_services
from support.nodes import own_temporary_directory
from support.rollouts import END, MODEL, Played, ask, write_toy_chat
from support.scripted import Json, call, script, tokens
from tokentape_executor.executor import Rollout, RolloutClient, Row
from tokentape_executor.trajectory import Sample

__all__ = ["marked"]

pytestmark = pytest.mark.timeout(150)

COUNT = 64
WORDS = ("two and three", "is five,", "of course.")


def slowly(text: str) -> Json:
    """An answer of a script, in three pieces."""
    half = len(text) // 2
    pieces: tuple[Json, ...] = ({"text": text[:half], "delay_ms": 60}, {"text": text[half:], "delay_ms": 120})
    return call(*pieces, tokens(END, finish="stop", delay_ms=60))


SCRIPT = script(*map(slowly, WORDS), repeat=True, **MODEL)


class Talks:
    """An agent that asks three times; remembers what it was told."""

    def __init__(self) -> None:
        self.talks: dict[str, list[str]] = {}

    async def __call__(self, task: Row, client: RolloutClient) -> float:
        talk = [f"question {task['number']}"]
        for turn in range(3):
            talk.append(await ask(client, *talk))
            talk.append(f"and then {turn}")
        self.talks[client.tape_id] = talk[:-1]
        return task["number"]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    tmp_path_factory.getbasetemp()  # which would else be made in there
    with own_temporary_directory(monkeypatch) as directory:
        yield directory


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("seed", [4, 8])
async def test_e13_64_rollouts_end_well_whatever_is_killed(
    seed: int, marked: Marked, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_toy_chat(tmp_path)
    agent = Talks()
    async with mortal_services(SCRIPT, tmp_path, tmp_path) as served:
        chaos = Chaos.planned(seed, marked, served.tapes, {"bridge": 2, "sidecar": 2, "keeper": 1}, seconds=0.8)
        executor = Played(served.policy, agent, retries=len(chaos.plan))
        async with chaos.reigns():
            results = await executor.rollouts([{"number": number} for number in range(COUNT)], concurrency=16)
        chaos.report(results)
        check_attempts(chaos, results, COUNT)
        await served.check_tapes()
    check_nothing_left(chaos)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for number, result in enumerate(results):
        assert isinstance(result, Rollout)
        assert result.outcome.reward == number
        (sample,) = result.trajectory.samples
        assert result.trajectory.receipt.kept == sample.action_token_count
        check_sample(sample, agent.talks[result.tape_id], tokenizer)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def check_sample(sample: Sample, talk: list[str], tokenizer: Tokenizer) -> None:
    """The sample is the talk as the toy's template writes it, and the model's words in it, with their ends, actions."""
    expected: list[int] = []
    ranges: list[tuple[int, int]] = []

    def add(text: str) -> None:
        expected.extend(tokenizer.encode(text, add_special_tokens=False).ids)

    for user, answer in zip(talk[::2], talk[1::2], strict=True):
        assert answer in WORDS
        add(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n")
        start = len(expected)
        add(f"{answer}<|im_end|>")
        ranges.append((start, len(expected)))
        add("\n")
    assert sample.tokens == expected[:-1]
    assert sample.action_ranges == ranges
    sampled = {position for start, end in ranges for position in range(start, end)}
    assert sample.logprobs == [-1.0 if position in sampled else 0.0 for position in range(len(sample.tokens))]
