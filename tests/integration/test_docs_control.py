"""docs/control.md, pasted: with each of the two tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.curls import TOOLS_HERE, Tool, assert_same_calls, told_with
from support.readme import Reader, blocks, free_port

pytestmark = pytest.mark.timeout(240)

START = "Start"
IN_ORDER = [
    "State",
    "A trainer's step",
    "How to pause",
    "When an update fails",
    "Sleep",
    "Calls that must not grow stale",
]
WITHOUT_BLOCKS = ["A trainer that has the engine itself", "What vLLM does and does not do"]
METHODS = 9


@pytest.fixture
def page(checkout: Path) -> Path:
    return checkout / "docs" / "control.md"


@pytest.fixture
def reader(checkout: Path, model_directory: Path, tmp_path: Path) -> Reader:
    assert model_directory.is_relative_to(checkout)
    return Reader(checkout, tmp_path, {50051: free_port()})


def shell(page: Path, headings: Sequence[str]) -> list[str]:
    return [text for heading in headings for text in blocks(page, heading, "sh")]


def test_both_tools_are_told_the_same_calls_and_every_method_is_there(page: Path) -> None:
    calls = assert_same_calls(*shell(page, IN_ORDER))
    methods = {call.method for call in calls if "ControlService/" in call.method}
    assert len(methods) == METHODS


def test_no_section_is_left_out(page: Path) -> None:
    headings = [line.removeprefix("## ").strip() for line in page.read_text().splitlines() if line.startswith("## ")]
    assert sorted(headings) == sorted([START, *IN_ORDER, *WITHOUT_BLOCKS])


@pytest.mark.parametrize("tool", TOOLS_HERE)
def test_the_calls(page: Path, reader: Reader, tool: Tool) -> None:
    texts = told_with(tool, shell(page, [START, *IN_ORDER]))
    [example] = blocks(page, "A trainer's step", "python")
    python = f"wait %2\npython - <<'EOT'\n{example}EOT"
    keep = "mv $RUN/generated.txt $RUN/stale.txt out/; rm -r $RUN"
    after_step = 3
    output = reader.paste(*texts[:after_step], python, *texts[after_step:], keep, seconds=200)

    assert "tokentape.v1.ControlService" in output
    assert "ENGINE_STATE_RUNNING 3 0" in output
    assert "ENGINE_STATE_WEIGHTS_BROKEN" in output
    assert "the shapes differ" in output
    assert "NOT_SERVING" in output
    events = _events((reader.directory / "out" / "generated.txt").read_text())
    deltas = [event["delta"] for event in events if "delta" in event]
    versions = [delta.get("weightVersion", delta.get("weight_version", "")) for delta in deltas]
    assert versions == sorted(versions)
    assert set(versions) == {"", "2"}
    assert (
        "the weights have changed 1 times since this call's first token"
        in (reader.directory / "out" / "stale.txt").read_text()
    )


def _events(text: str) -> list[dict[str, dict[str, str]]]:
    """The JSON objects that a tool has written, one after the other."""
    decoder = json.JSONDecoder()
    found: list[dict[str, dict[str, str]]] = []
    rest = text.strip()
    while rest:
        event, end = decoder.raw_decode(rest)
        found.append(event)
        rest = rest[end:].lstrip()
    return found
