"""docs/debugging.md, pasted: with `buf curl` as a whole, and its calls with `grpcurl` too, where that is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from support.curls import TOOLS_HERE, Tool, assert_same_calls, told_with
from support.readme import Reader, blocks, free_port

pytestmark = pytest.mark.timeout(240)

START = "Start"
OF_CURLS = ["What is there", "Generate by hand", "Record a tape and read it", "Which weights sampled what"]
OTHERS = [
    "Why a prefix split",
    "Is this the prompt that I meant",
    "tokentape-watch",
    "Replay a rollout without a model",
    "Verify a tape",
]


@pytest.fixture
def page(checkout: Path) -> Path:
    return checkout / "docs" / "debugging.md"


@pytest.fixture
def reader(checkout: Path, model_directory: Path, tmp_path: Path) -> Reader:
    assert model_directory.is_relative_to(checkout)
    return Reader(checkout, tmp_path, {port: free_port() for port in (50051, 50052, 8000)})


def shell(page: Path, headings: Sequence[str]) -> list[str]:
    return [text for heading in headings for text in blocks(page, heading, "sh")]


def test_both_tools_are_told_the_same_calls(page: Path) -> None:
    assert len(assert_same_calls(*shell(page, OF_CURLS))) == 10


def test_no_section_is_left_out(page: Path) -> None:
    headings = [line.removeprefix("## ").strip() for line in page.read_text().splitlines() if line.startswith("## ")]
    assert headings == [START, *OF_CURLS, *OTHERS]


@pytest.mark.parametrize("tool", TOOLS_HERE)
def test_the_calls(page: Path, reader: Reader, tool: Tool) -> None:
    texts = told_with(tool, shell(page, [START, *OF_CURLS]))
    output = reader.paste(*texts, seconds=120)

    assert "tokentape.v1.TapeService" in output
    assert ("message TapeEntry" in output) == (tool == "grpcurl")
    assert "SERVING" in output
    assert '{"prompt":"The capital of France is"}' in output
    # The text of the tokens, watched and got; from the fourth sequence number on it is " of".
    watched = (reader.directory / "out" / "watched.txt").read_text()
    for piece in (" capital", " Paris", " of", " course"):
        assert f'"{piece}"' in watched
    assert "|im_end|" in watched
    assert "sampled_token_count" in watched or "sampledTokenCount" in watched
    versions = [line.strip().rstrip(",") for line in output.splitlines() if "ersion" in line][-2:]
    assert [version[-3:] for version in versions] == ['"1"', '"2"']


def test_the_rest(page: Path, reader: Reader) -> None:
    output = reader.paste(*shell(page, [START, *OTHERS]), seconds=220)

    turns = [line for line in output.splitlines() if line.startswith("{'x-prefix'")]
    assert turns == [
        "{'x-prefix': 'new', 'x-split-cause': 'new_conversation'}",
        "{'x-prefix': 'kept'}",
        "{'x-prefix': 'new', 'x-split-cause': 'history_edited'}",
    ]
    assert "split: history_edited" in output
    assert "the same" in output.splitlines()
    assert " Paris⟨7042⟩" in output
    assert "⟦weights 2⟧" in output
    assert "sealed  3 calls, 18 tokens sampled" in output
    assert '      2 "ledger_sha256"' in output
    assert "these were not sampled by this model" in output
