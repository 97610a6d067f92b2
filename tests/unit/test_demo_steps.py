"""Progress of the demo's steps, on terminals and elsewhere."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from tokentape_executor.demo.steps import Steps


def make(*, terminal: bool) -> tuple[Steps, io.StringIO]:
    file = io.StringIO()
    return Steps(Console(file=file, width=80, force_terminal=terminal, color_system=None)), file


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_ends_with_a_tick_and_its_time(terminal: bool) -> None:
    steps, output = make(terminal=terminal)

    with steps.step("cooking [1]", "cooked [1]"):
        pass

    assert output.getvalue().endswith(" ✓ cooked [1]  0.0 s\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_failed_step_ends_with_a_cross_and_its_exception(terminal: bool) -> None:
    steps, output = make(terminal=terminal)

    with pytest.raises(RuntimeError, match="burnt"), steps.step("cooking", "cooked"):
        raise RuntimeError("burnt")

    assert output.getvalue().endswith(" ✗ cooking  0.0 s\n")


def test_without_a_terminal_a_long_step_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentape_executor.demo.steps._HEARTBEAT_SECONDS", 0.02)
    steps, output = make(terminal=False)

    with steps.step("cooking", "cooked"):
        time.sleep(0.1)

    lines = output.getvalue().splitlines()
    assert lines[0] == "   … cooking"
    assert lines[1] == "   … cooking, 0 s"
    assert "\x1b" not in output.getvalue()
