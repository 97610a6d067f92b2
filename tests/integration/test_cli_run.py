"""`tokentape-rollout` as a process, on scripted sidecars: what interrupts it, and what it makes of that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tokentape_executor.tape_file import read_tapes

if TYPE_CHECKING:
    from integration.conftest import Bridge, ServerProcess, StartBridge, StartSidecar

pytestmark = [
    # Each starts several processes, one after the other.
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

AGENTS = Path(__file__).parent.parent / "support" / "rollout_agents.py"
SECONDS = 45
END = 2
MARK = "TOKENTAPE_TEST_RUN"


def script(delay_ms: float = 10) -> dict[str, Any]:
    steps = [{"text": "It is five.", "delay_ms": delay_ms, "weight_version": "7"}, {"token_ids": [END]}]
    return {
        "model": {"name": "toy", "vocab_size": 49152, "eos_token_ids": [END]},
        "calls": [{"steps": steps}],
        "repeat": True,
    }


@dataclass
class Command:
    """`tokentape-rollout` in a directory of its own, with its options; each run is a process."""

    directory: Path
    options: list[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def output(self) -> Path:
        return self.directory / "results.jsonl"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def write(self, *tasks: dict[str, Any]) -> None:
        (self.directory / "prompts.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))

    def start(self, *more: str, agent: str = "Asker") -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name("tokentape-rollout")), str(self.directory / "prompts.jsonl")]
        command += ["-o", str(self.output), "--agent", f"{AGENTS}:{agent}", *self.options, *more]
        with (self.directory / "log").open("wb") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.environment, MARK: self.mark}
            )

    def run(self, *more: str) -> int:
        return self.start(*more).wait(SECONDS)

    def rows(self) -> list[dict[str, Any]]:
        text = self.output.read_text() if self.output.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for_rows(self, count: int, running: subprocess.Popen[bytes]) -> None:
        wait_until(lambda: len(self.rows()) >= count or running.poll() is not None)
        assert running.poll() is None, self.log

    def left_running(self) -> list[str]:
        return [str(process.info) for process in psutil.process_iter(["name"]) if self.mark in _mark_of(process)]


def _mark_of(process: psutil.Process) -> str:
    try:
        return process.environ().get(MARK, "")
    except psutil.Error:
        return ""


def wait_until(condition: Any, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pairs(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["prompt_index"], row["sample_index"]) for row in rows]


def tasks(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {index} + 1?"} for index in range(count)]


@pytest.fixture(scope="module")
def sidecar(start_sidecar: StartSidecar) -> ServerProcess:
    return start_sidecar(script(), name="a")


@pytest.fixture(scope="module")
def bridge(sidecar: ServerProcess, start_bridge: StartBridge) -> Bridge:
    return start_bridge(a=sidecar.address).wait_healthy()


@pytest.fixture
def command(sidecar: ServerProcess, bridge: Bridge, tmp_path: Path) -> Iterator[Command]:
    made = Command(tmp_path, ["--sidecar", sidecar.address, "--bridge", str(bridge.client.base_url)])
    yield made
    wait_until(lambda: not made.left_running(), 10)


def test_every_prompt_as_often_as_wanted_with_a_bridge_of_its_own(
    sidecar: ServerProcess, command: Command, tmp_path: Path
) -> None:
    import datasets  # noqa: PLC0415 - seconds

    command.write(*tasks(20))
    command.options = ["--sidecar", sidecar.address, "--samples", "2", "--tapes", str(tmp_path / "new" / "tapes.jsonl")]
    assert command.run("--max-tokens", "100") == 0, command.log
    rows = command.rows()
    assert pairs(rows) == [(prompt, sample) for prompt in range(20) for sample in range(2)]
    assert {row["status"] for row in rows} == {"completed"}
    assert [json.loads(row["task"])["question"] for row in rows[::2]] == [task["question"] for task in tasks(20)]
    for row in rows:
        (sample,) = row["samples"]
        sampled = [token for start, end in sample["action_ranges"] for token in sample["tokens"][start:end]]
        assert sampled.count(END) == 2
        assert row["receipt"]["sampled"] == row["receipt"]["kept"] == len(sampled)
        assert row["receipt"]["weight_versions"] == ["7"]
    tapes = [tape.trajectory() for tape in read_tapes(tmp_path / "new" / "tapes.jsonl")]
    assert {tape.receipt.ledger_sha256 for tape in tapes} == {row["receipt"]["ledger_sha256"] for row in rows}
    assert "40 of 40" in command.log
    loaded: Any = datasets.load_dataset(
        "json", data_files=str(command.output), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded[39] == rows[39]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_what_interrupts_it_loses_nothing_and_repeats_nothing(
    command: Command, number: signal.Signals, status: int
) -> None:
    command.write(*tasks(20))
    options = ("--samples", "5", "--concurrency", "4")
    running = command.start(*options)
    command.wait_for_rows(10, running)
    running.send_signal(number)
    sent = time.monotonic()
    assert running.wait(SECONDS) == status
    assert time.monotonic() - sent < 8
    first = command.rows()
    assert 10 <= len(first) < 100
    assert "Traceback" not in command.log
    if number is not signal.SIGKILL:
        assert f"{len(first)} of 100 rollouts are in" in command.log
        assert "run the same command again to continue" in command.log
    with command.output.open("ab") as file:
        file.write(b'{"prompt_index":19,"sample_index":4,"ta')

    assert command.run(*options) == 0, command.log
    rows = command.rows()
    assert pairs(rows) == [(prompt, sample) for prompt in range(20) for sample in range(5)]
    assert [row for row in rows if row["tape_id"] in {each["tape_id"] for each in first}] == sorted(
        first, key=lambda row: (row["prompt_index"], row["sample_index"])
    )
    assert len({row["tape_id"] for row in rows}) == 100

    before = command.output.read_bytes()
    assert command.run(*options) == 0
    assert command.output.read_bytes() == before


def test_a_second_signal_and_an_agent_that_blocks(command: Command, tmp_path: Path) -> None:
    command.write({"started": str(tmp_path / "started")})
    for signals, seconds in ((1, 8), (2, 3)):
        (tmp_path / "started").unlink(missing_ok=True)
        running = command.start(agent="Blocker")
        wait_until((tmp_path / "started").exists)
        sent = time.monotonic()
        for _ in range(signals):
            running.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert running.wait(SECONDS) == 130
        assert time.monotonic() - sent < seconds
        assert "Traceback" not in command.log
        assert command.rows() == []


def test_a_second_process_on_one_file_is_refused(command: Command, tmp_path: Path) -> None:
    command.write(*tasks(20))
    options = ("--samples", "5", "--concurrency", "2")
    running = command.start(*options)
    command.wait_for_rows(1, running)
    other = Command(tmp_path / "other", command.options)
    other.directory.mkdir()
    other.write(*tasks(20))
    (other.directory / "results.jsonl").symlink_to(command.output)
    assert other.run(*options) == 2
    assert "another tokentape-rollout is writing to it" in other.log
    running.send_signal(signal.SIGTERM)
    assert running.wait(SECONDS) == 143


def test_failed_rollouts_are_rows_until_they_are_to_be_run_again(command: Command, tmp_path: Path) -> None:
    switch = tmp_path / "broken"
    switch.touch()
    given = [
        {**task, **({"fails_while": str(switch)} if index % 4 == 0 else {})} for index, task in enumerate(tasks(8))
    ]
    command.write(*given)
    assert command.run("--retries", "1") == 1, command.log
    rows = command.rows()
    assert Counter(row["status"] for row in rows) == {"completed": 6, "failed": 2}
    assert {(row["error_type"], row["attempts"]) for row in rows if row["status"] == "failed"} == {("AgentFailed", 2)}
    assert "as the task says" in rows[0]["error"]
    assert "failed of AgentFailed" in command.log

    switch.unlink()
    assert command.run() == 1, "failed rows count although they are not run again"
    assert command.rows() == rows
    assert command.run("--retry-failed") == 0, command.log
    assert pairs(command.rows()) == [(index, 0) for index in range(8)]
    assert [row for row in command.rows() if row["prompt_index"] % 4] == [
        row for row in rows if row["prompt_index"] % 4
    ]


def test_a_placeholder_stands_for_what_failed(command: Command, tmp_path: Path) -> None:
    command.write({"question": "What?", "fails_while": str(tmp_path)})
    assert command.run("--retries", "0", "--on-failure", "placeholder") == 1, command.log
    (row,) = command.rows()
    assert (row["status"], row["error_type"], row["reward"]) == ("placeholder", "AgentFailed", 0.0)
    assert row["receipt"]["kept"] == 1


def test_other_prompts_and_options_are_refused_and_more_samples_are_not(command: Command) -> None:
    command.write(*tasks(3))
    assert command.run() == 0, command.log
    command.write(*tasks(3)[::-1])
    assert command.run() == 2
    assert "made from other prompts" in command.log
    command.write(*tasks(3))
    assert command.run("--temperature", "0.3") == 2
    assert "made with other options: --temperature was left out and is now 0.3" in command.log
    command.write(*tasks(4))
    assert command.run("--samples", "2", "--limit", "3") == 0, command.log
    assert pairs(command.rows()) == [(prompt, sample) for prompt in range(3) for sample in range(2)]


def test_two_sidecars_share_the_rollouts(
    sidecar: ServerProcess, start_sidecar: StartSidecar, start_bridge: StartBridge, tmp_path: Path
) -> None:
    other, same = start_sidecar(script(), name="b"), start_sidecar(script(), name="a")
    both = start_bridge(a=sidecar.address, b=other.address).wait_healthy()
    addresses = ["--sidecar", sidecar.address, "--sidecar", other.address]
    command = Command(tmp_path, [*addresses, "--bridge", str(both.client.base_url)])
    command.write(*tasks(20))
    assert command.run("--concurrency", "4") == 0, command.log
    counts = Counter(row["tape_id"].partition(".")[0] for row in command.rows())
    assert counts.total() == 20
    assert min(counts["a"], counts["b"]) >= 6

    command.options = ["--sidecar", sidecar.address, "--sidecar", same.address]
    assert command.run("--samples", "2") == 2
    assert f"those at {sidecar.address} and {same.address} are both named 'a'" in command.log


def test_rollouts_wait_for_a_sidecar_that_comes_back(
    start_sidecar: StartSidecar, start_bridge: StartBridge, tmp_path: Path
) -> None:
    mortal = start_sidecar(script(40), name="m")
    command = Command(
        tmp_path,
        ["--sidecar", mortal.address, "--bridge", str(start_bridge(m=mortal.address).wait_healthy().client.base_url)],
    )
    command.write(*tasks(60))
    running = command.start("--concurrency", "4")
    command.wait_for_rows(8, running)
    mortal.kill()
    time.sleep(3)
    done = len(command.rows())
    assert running.poll() is None, command.log
    start_sidecar(script(40), name="m", listen=mortal.address)
    assert running.wait(SECONDS) == 0, command.log
    rows = command.rows()
    assert pairs(rows) == [(index, 0) for index in range(60)]
    assert {row["status"] for row in rows} == {"completed"}
    assert done < 60
    assert sum(row["attempts"] > 1 for row in rows) in range(1, 5)


def test_a_policy_that_does_not_come_back_ends_the_run_and_fails_no_rollout(
    start_sidecar: StartSidecar, start_bridge: StartBridge, tmp_path: Path
) -> None:
    mortal = start_sidecar(script(40), name="g")
    bridge = start_bridge(g=mortal.address).wait_healthy()
    options = ["--sidecar", mortal.address, "--bridge", str(bridge.client.base_url)]
    command = Command(tmp_path, options, {"TOKENTAPE_START_TIMEOUT": "3"})
    command.write(*tasks(60))
    running = command.start("--concurrency", "4")
    command.wait_for_rows(8, running)
    mortal.kill()
    assert running.wait(SECONDS) == 2
    assert "no sidecar has served for 3 s" in command.log
    assert "run the same command again to continue" in command.log
    assert {row["status"] for row in command.rows()} == {"completed"}

    assert command.run() == 2
    assert f"the sidecar at {mortal.address} did not answer within 3 s" in command.log
