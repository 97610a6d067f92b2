"""SECURITY.md: each promise names its test, and that test is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

_ROW = re.compile(r"^\|(?P<promise>[^|]*)\|(?P<tried>[^|]*)\| `(?P<file>tests/\S+\.py)::(?P<test>\w+)` \|$")


def rows(checkout: Path) -> list[re.Match[str]]:
    text = (checkout / "SECURITY.md").read_text()
    _, _, section = text.partition("## Promises")
    section, _, _ = section.partition("\n## ")
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    matches = [_ROW.match(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if match is None]
    return [match for match in matches if match is not None]


def functions_of(file: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, functions)}


def test_each_promise_has_its_test(checkout: Path) -> None:
    missing = [row["test"] for row in rows(checkout) if row["test"] not in functions_of(checkout / row["file"])]
    assert missing == []


def test_one_test_stands_for_one_row(checkout: Path) -> None:
    tests = [row["test"] for row in rows(checkout)]
    assert len(tests) > 50
    assert len(set(tests)) == len(tests)
    assert all(row["tried"].strip() for row in rows(checkout))


@pytest.mark.parametrize("name", ["adversary", "adversary_bridge", "limits"])
def test_what_the_adversary_tries_is_in_the_table(checkout: Path, name: str) -> None:
    file = checkout / f"tests/integration/test_security_{name}.py"
    told = {row["test"] for row in rows(checkout)}
    untold = {test for test in functions_of(file) if test.startswith("test_")} - told
    assert untold <= {
        "test_fingerprints_count_as_the_tapes_bytes",
        "test_a_long_foreign_word_in_an_error_does_not_break_the_answer",
        "test_the_command_line_sets_them_all",
    }
