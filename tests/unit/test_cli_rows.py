"""Rows: one schema for all, which `datasets` loads; and what they add up to."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from support.rollout_rows import failed_row, prompt, rollout, row
from tokentape_executor.cli.progress import Progress, TokenRate
from tokentape_executor.cli.row import Json, result_row, to_line
from tokentape_executor.cli.summary import ThisRun, Totals, summary
from tokentape_executor.errors import AgentFailed, PolicyUnavailable

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def placeholder_row(index: int) -> Json:
    stand_in = rollout(9, reward=0.0, failure="RolloutTimeout: too long")
    return result_row(prompt(index), 0, stand_in, terms={}, seconds=1.0)


def schema(value: Any) -> Any:
    """The types of a row, as far as its lists have anything."""
    if isinstance(value, dict):
        return {key: schema(each) for key, each in cast("Json", value).items()}
    if isinstance(value, list):
        return [schema(each) for each in cast("list[Any]", value)[:1]]
    return type(value).__name__


def test_every_row_has_the_same_keys_and_types() -> None:
    completed, failed, placeholder = (schema(each) for each in (row(0), failed_row(1), placeholder_row(2)))
    assert completed == placeholder
    assert failed["samples"] == []
    assert failed["receipt"].pop("weight_versions") == []
    assert completed["receipt"].pop("weight_versions") == ["str"]
    assert {**completed, "samples": []} == failed


def test_a_row_has_what_a_trainer_needs() -> None:
    made = row(4, 1, ids=(10, 11), reward=0.25)
    assert (made["prompt_index"], made["sample_index"], made["task"]) == (4, 1, '{"question": "4"}')
    assert (made["status"], made["error"], made["reward"], made["attempts"]) == ("completed", "", 0.25, 1)
    (sample,) = made["samples"]
    assert sample["tokens"] == [1, 2, 10, 11]
    assert sample["action_ranges"] == [[2, 4]]
    assert sample["logprobs"] == [0.0, 0.0, -0.5, -0.5]
    assert sample["weight_versions"][0]["weight_version"] == "1"
    assert (sample["split_cause"], sample["parent_sample"]) == ("new_conversation", -1)
    assert made["receipt"]["sampled"] == made["receipt"]["kept"] == 2
    assert made["receipt"]["dropped"] == {"superseded": 0, "abandoned": 0, "failed": 0}


def test_a_failed_row_says_of_what() -> None:
    made = failed_row(0, error=PolicyUnavailable("half a character: \ud800"), attempts=3)
    assert (made["status"], made["error_type"], made["attempts"]) == ("failed", "PolicyUnavailable", 3)
    assert b"half a character: ?" in to_line(made)
    assert placeholder_row(0)["error_type"] == "RolloutTimeout"


def test_datasets_loads_them_however_the_rollouts_went(tmp_path: Path) -> None:
    """Failed rows fill more than the first block that the loader reads its types from."""
    import datasets  # noqa: PLC0415 - seconds

    failed = [failed_row(index, error=AgentFailed("why " * 200)) for index in range(400)]
    rows = [*failed, *(row(400 + index, ids=range(3, 4 + index)) for index in range(50)), placeholder_row(450)]
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"".join(to_line(each) for each in rows))
    loaded: Any = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == len(rows)
    assert loaded[0]["samples"] == []
    assert loaded[449] == rows[449]
    assert loaded[450]["status"] == "placeholder"


def test_totals_are_the_sums_of_the_receipts() -> None:
    totals = Totals()
    for each in (row(0, reward=1.0), row(1, reward=0.0, ids=(5,)), failed_row(2), failed_row(3), placeholder_row(4)):
        totals.add(each)
    assert (totals.rollouts, totals.failed, totals.mean_reward) == (5, 3, 0.5)
    assert totals.causes == {"AgentFailed": 2, "RolloutTimeout": 1}
    assert (totals.calls, totals.sampled, totals.kept, totals.samples) == (3, 4, 4, 3)
    assert totals.splits["new_conversation"] == 3
    assert list(totals.weight_versions) == ["1"]
    assert totals.conserved


def test_tokens_that_nobody_accounts_for_are_told() -> None:
    broken = row(0)
    broken["receipt"] |= {"sampled": 7}
    totals = Totals()
    totals.add(broken)
    assert not totals.conserved
    assert " NO " in shown(totals)


def shown(totals: Totals) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(summary(totals, 9, ThisRun(2, 300, 2.0)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_summary_shows_the_figures() -> None:
    totals = Totals()
    for each in (row(0), failed_row(1)):
        totals.add(each)
    lines = [line.replace("│", " ").split() for line in shown(totals).splitlines()]
    for line in (
        ["rollouts", "2", "of", "9"],
        ["failed", "of", "AgentFailed", "1"],
        ["mean", "reward", "1.0000"],
        ["tokens", "sampled", "2"],
        ["dropped:", "abandoned", "0"],
        ["split:", "new_conversation", "1"],
        ["weight", "versions", "1"],
        ["tokens/s", "150.0"],
    ):
        assert line in lines


def test_progress_in_a_line() -> None:
    totals = Totals()
    progress = Progress(Console(file=io.StringIO()), totals, wanted=9)
    assert progress.line().startswith("0/9 rollouts · 0 running · 0.0 tokens/s · mean reward - · 0 failed")
    totals.add(row(0, reward=0.5))
    totals.add(failed_row(1))
    progress.running, progress.note = 3, ""
    assert progress.line().startswith("2/9 rollouts · 3 running")
    assert progress.line().endswith("mean reward 0.500 · 1 failed (1 AgentFailed)")


def test_the_rate_is_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tokentape_executor.cli.progress.time.monotonic", lambda: now)
    rate, last = TokenRate(), 0.0
    for _ in range(100):
        now += 1
        rate.add(7)
        last = rate.per_second()
    assert last == pytest.approx(7)
    for _ in range(20):
        now += 1
        last = rate.per_second()
    assert (last, rate.total) == (0.0, 700)
