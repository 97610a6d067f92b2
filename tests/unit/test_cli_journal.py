"""The file of results as a journal: what interrupts it, and who else comes to it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from support.rollout_rows import TERMS, failed_row, prompt, row
from tokentape_executor.cli.journal import Journal, JournalError, Pair, cut_torn_line
from tokentape_executor.cli.prompts import Prompt
from tokentape_executor.cli.row import Json, to_line
from tokentape_executor.cli.terms import Terms, differences

PROMPTS = [prompt(index) for index in range(3)]


def opened(
    path: Path, *, prompts: list[Prompt] | None = None, terms: Terms = TERMS, retry_failed: bool = False
) -> tuple[Journal, list[Json]]:
    seen: list[Json] = []
    return Journal.open(path, prompts or PROMPTS, terms, retry_failed=retry_failed, seen=seen.append), seen


def written(path: Path, *rows: Json) -> None:
    path.write_bytes(b"".join(to_line(each) for each in rows))


def pairs_in(path: Path) -> list[tuple[int, int]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(each["prompt_index"], each["sample_index"]) for each in rows]


def test_what_was_appended_is_there_at_the_next_opening(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    journal, seen = opened(path)
    assert (journal.pairs, seen) == (frozenset(), [])
    journal.append(row(2))
    journal.append(row(0, 1))
    journal.close()

    journal, seen = opened(path)
    assert journal.pairs == {Pair(2, 0), Pair(0, 1)}
    assert seen == [row(2), row(0, 1)]
    journal.append(row(1))
    journal.close()
    assert pairs_in(path) == [(2, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize("kept", [1, 9, 60, -1])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "results.jsonl"
    whole = to_line(row(0))
    path.write_bytes(whole + to_line(row(1))[:kept])
    journal, _ = opened(path)
    assert journal.pairs == {Pair(0, 0)}
    assert path.read_bytes() == whole
    journal.append(row(1))
    journal.close()
    assert path.read_bytes() == whole + to_line(row(1))


def test_rows_are_put_into_the_prompts_order_by_a_replacement(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    rows = [row(2), row(0, 1), row(1, ids=range(1000)), row(0)]
    written(path, *rows[:2])
    journal, _ = opened(path)
    for each in rows[2:]:
        journal.append(each)
    before = path.stat().st_ino
    journal.sort()
    assert path.stat().st_ino != before
    assert path.read_bytes() == b"".join(to_line(each) for each in (rows[3], rows[1], rows[2], rows[0]))
    journal.append(row(2, 1))
    journal.sort()
    journal.close()
    assert pairs_in(path) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    assert list(tmp_path.iterdir()) == [path]


def test_failed_rows_stay_unless_they_are_to_be_run_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    written(path, row(1), failed_row(0), row(2))
    journal, seen = opened(path)
    assert journal.pairs == {Pair(0, 0), Pair(1, 0), Pair(2, 0)}
    assert len(seen) == 3
    journal.close()

    journal, seen = opened(path, retry_failed=True)
    assert journal.pairs == {Pair(1, 0), Pair(2, 0)}
    assert seen == [row(1), row(2)]
    journal.append(row(0))
    journal.sort()
    journal.close()
    assert pairs_in(path) == [(0, 0), (1, 0), (2, 0)]


def test_a_draft_that_a_kill_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    written(path, row(1), row(0))
    (tmp_path / ".results.jsonl.draft").write_text("half")
    journal, _ = opened(path)
    journal.sort()
    journal.close()
    assert pairs_in(path) == [(0, 0), (1, 0)]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([to_line(row(0)), b'{"a": 1}\n'], r":2: no result of tokentape-rollout: prompt_index is missing"),
        ([b"[]\n"], ":1: no result of tokentape-rollout"),
        ([to_line(row(0)), b"{half\n", to_line(row(1))], ":2: not JSON"),
        ([to_line(row(0)), to_line(row(0))], ":2: prompt 0, sample 0 is there twice"),
        ([to_line(row(3) | {"prompt_index": 3})], ":1: made from other prompts: it is of prompt 3, and there are 3"),
        ([to_line(row(0) | {"task": '{"question": "x"}'})], ":1: made from other prompts: its task is .*x"),
        ([to_line(row(0) | {"terms": "none"})], ":1: no result of tokentape-rollout: terms is no JSON object"),
        ([b"a text without an end"], "no result of tokentape-rollout: it ends with"),
    ],
)
def test_a_file_that_is_not_of_these_prompts_is_refused_and_left_alone(
    tmp_path: Path, lines: list[bytes], problem: str
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"".join(lines))
    with pytest.raises(JournalError, match=problem):
        opened(path)
    assert path.read_bytes() == b"".join(lines)
    # Nor does it stay locked.
    path.write_bytes(b"")
    opened(path)[0].close()


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({**TERMS, "--temperature": 0.9}, ":1: made with other options: --temperature was 0.7 and is now 0.9; give"),
        ({**TERMS, "--temperature": None}, "--temperature was 0.7 and is now left out"),
        ({**TERMS, "--top-p": 0.5, "--agent": "math"}, 'was "agent.py:Agent" and is now "math", --top-p was left out'),
        ({**TERMS, "TOKENTAPE_KEEP_REASONING": True}, "TOKENTAPE_KEEP_REASONING was left out and is now true"),
    ],
)
def test_a_file_that_was_made_with_other_options_is_refused_and_left_alone(
    tmp_path: Path, now: Terms, told: str
) -> None:
    path = tmp_path / "results.jsonl"
    written(path, row(0), failed_row(1))
    before = path.read_bytes()
    with pytest.raises(JournalError, match=told):
        opened(path, terms=now)
    assert path.read_bytes() == before


def test_rows_that_are_to_be_made_again_may_be_of_other_options(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    written(path, failed_row(0), failed_row(1))
    journal, seen = opened(path, terms={**TERMS, "--temperature": 1.0}, retry_failed=True)
    journal.close()
    assert (seen, path.read_bytes()) == ([], b"")


@pytest.mark.parametrize(("before", "now", "same"), [("a", "a", True), ("a", None, True), ("a", "b", False)])
def test_only_two_models_that_are_both_known_differ(before: str, now: str | None, *, same: bool) -> None:
    assert (differences({"--model": before}, {"--model": now}) == "") is same


def test_a_second_process_is_refused_also_after_a_replacement(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    code = (
        "import sys; from pathlib import Path; from tokentape_executor.cli.journal import Journal\n"
        "Journal.open(Path(sys.argv[1]), [], {}, retry_failed=False, seen=print)"
    )

    def other() -> str:
        command = [sys.executable, "-c", code, str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stderr

    journal, _ = opened(path)
    assert "another tokentape-rollout is writing to it" in other()
    journal.append(row(1))
    journal.append(row(0))
    journal.sort()
    assert "another tokentape-rollout is writing to it" in other()
    journal.close()
    assert "made from other prompts" in other()


def test_a_row_that_does_not_fit_leaves_no_half_of_it(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    journal, _ = opened(path)
    journal.append(row(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        with pytest.raises(JournalError, match=r"cannot write to .*: File too large"):
            journal.append(row(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == to_line(row(0))
    journal.append(row(2))
    journal.close()
    assert pairs_in(path) == [(0, 0), (2, 0)]


def test_a_directory_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"cannot write to .*: Is a directory"):
        opened(tmp_path)


def test_torn_lines_of_other_files_are_cut_too(tmp_path: Path) -> None:
    path = tmp_path / "tapes.jsonl"
    cut_torn_line(path)
    assert not path.exists()
    path.write_bytes(b'{"a":1}\n{"b"')
    cut_torn_line(path)
    assert path.read_bytes() == b'{"a":1}\n'
