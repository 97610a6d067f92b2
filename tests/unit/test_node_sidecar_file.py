"""The bridge's `--sidecar-file`: what it may hold, and what a bridge's table makes of its changes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tokentape_bridge.settings import parse_settings
from tokentape_bridge.sidecar_file import SidecarTable


def replace(file: Path, content: object) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(content if isinstance(content, str) else json.dumps(content))
    draft.replace(file)


def test_the_table_is_the_files_of_now(tmp_path: Path) -> None:
    file = tmp_path / "sidecars.json"
    replace(file, {"a": "h:1"})
    table = SidecarTable({"fixed": "h:0"}, file)
    assert table.current() == {"fixed": "h:0", "a": "h:1"}
    replace(file, {"b": "h:2", "a": "h:3"})
    assert table.current() == {"fixed": "h:0", "a": "h:3", "b": "h:2"}
    replace(file, {})
    assert table.current() == {"fixed": "h:0"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "Expecting property name"),
        ("[]", "does not hold a JSON object"),
        ({"a.b": "h:1"}, "'a.b' is no name of a sidecar"),
        ({"b": 3}, "b: 3 is no address"),
        ({"b": ""}, "b: '' is no address"),
        ({"fixed": "h:1"}, "--sidecar fixed is there already"),
        (None, "No such file"),
    ],
)
def test_what_cannot_be_used_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: object, problem: str
) -> None:
    file = tmp_path / "sidecars.json"
    replace(file, {"a": "h:1"})
    table = SidecarTable({"fixed": "h:0"}, file)
    before = table.current()
    caplog.clear()
    if content is None:
        file.unlink()
    else:
        replace(file, content)
    for _ in range(3):
        assert table.current() == before
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert problem in caplog.text
    replace(file, {"b": "h:2"})
    assert table.current() == {"fixed": "h:0", "b": "h:2"}


def test_a_bridge_needs_one_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = parse_settings(["--sidecar-file", str(tmp_path / "f")])
    assert (dict(settings.sidecars), settings.sidecar_file) == ({}, tmp_path / "f")
    with pytest.raises(SystemExit):
        parse_settings([])
    assert "one of the arguments --sidecar and --sidecar-file is required" in capsys.readouterr().err
