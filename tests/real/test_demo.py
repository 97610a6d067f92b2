"""The demo as people run it: on real vLLM and real NeMo Gym, to its end and interrupted."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

MARK = "TOKENTAPE_DEMO_TEST"


class Demo:
    """A running demo, and every process that it was seen to start."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.results = directory / "demo.jsonl"
        self._mark = secrets.token_hex(8)
        self._output = directory / "output.txt"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tokentape_executor.demo", "--model", str(model)),
                    *("--output", str(self.results), "--logs", str(directory / "logs")),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self._mark},
                start_new_session=True,
            )
        self._seen: set[psutil.Process] = set()

    @property
    def output(self) -> str:
        return self._output.read_text()

    def run_until(self, text: str | None = None) -> None:
        """Return when the output has `text` (None: never) or the demo has ended."""
        while self._process.poll() is None and not (text and text in self.output):
            # Not its children only: what keeps bridge and Gym is none.
            self._seen.update(process for process in self._marked() if process.pid != self._process.pid)
            time.sleep(0.2)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        self.run_until()
        return self._process.wait()

    def left_over(self) -> list[str]:
        """What still runs of the demo: processes that it was seen to start, or that carry its mark."""
        alive = {process for process in self._seen if process.is_running()} | set(self._marked())
        return [str(process) for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def _marked(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark:
                    yield process
            except psutil.Error:
                continue

    def process_count(self) -> int:
        return len(self._seen)

    def kill(self) -> None:
        """End what a failed test has left; the demo's own watchers end the rest."""
        self._process.kill()
        self._process.wait()


@pytest.fixture
def demo(model_directory: Path, tmp_path: Path) -> Iterator[Demo]:
    running = Demo(model_directory, tmp_path)
    yield running
    running.kill()


def check(result: dict[str, Any]) -> None:
    """Check one line of the demo's results against what the executor promises."""
    tokens, log_probs, ranges = result["observation_tokens"], result["rollout_log_probs"], result["action_ranges"]
    assert len(tokens) == len(log_probs) == len(result["pieces"])
    assert len(ranges) == 1
    start, end = ranges[0]
    assert 0 < start < end == len(tokens)
    assert all(value == 0.0 for value in log_probs[:start])
    assert all(value <= 0.0 for value in log_probs[start:])
    assert any(value < 0.0 for value in log_probs[start:])
    assert result["prompt"] in "".join(result["pieces"][:start])
    assert result["reward"] in {0.0, 1.0}
    # It ended by the end-of-turn token, which is an action too, or by a limit.
    assert result["truncated"] is (tokens[-1] != 2)


def test_three_rollouts_and_nothing_left(demo: Demo) -> None:
    status = demo.wait()

    assert status == 0, demo.output
    results = [json.loads(line) for line in demo.results.read_text().splitlines()]
    assert [result["label"] for result in results] == ["5", "7", "12"]
    assert len({result["tape_id"] for result in results}) == 3
    for result in results:
        check(result)
        assert f"[{result['action_ranges'][0][0]}, {len(result['observation_tokens'])})" in demo.output
    assert "every process has ended" in demo.output
    assert demo.process_count() > 10
    assert demo.left_over() == []


@pytest.mark.parametrize(
    ("number", "when", "status"),
    [(signal.SIGINT, "vLLM is loading the model, ", 130), (signal.SIGTERM, "rollouts are running", 143)],
    ids=["ctrl-c-while-loading", "sigterm-in-rollouts"],
)
def test_a_signal_ends_everything(demo: Demo, number: signal.Signals, when: str, status: int) -> None:
    demo.run_until(when)
    assert demo.process_count() > 1, demo.output

    demo.send(number)

    assert demo.wait() == status, demo.output
    assert demo.left_over() == []
    assert "Traceback" not in demo.output
    assert not demo.results.exists()
