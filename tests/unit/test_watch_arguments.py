"""The command line of `tokentape-watch`, and the file of reader tokens."""

from __future__ import annotations

import io
import math
import os
import stat
from pathlib import Path

import pytest

from tokentape.access import Access
from tokentape_executor.reader_tokens import ReaderTokenFile, ReaderTokensError, read_reader_tokens
from tokentape_executor.tape_client import OpenedTape
from tokentape_executor.watch.arguments import FollowOptions, ReplayOptions, parse
from tokentape_executor.watch.look import Ids, Look

TAPES = [OpenedTape(f"main.{digit * 32}", f"secret-{digit}") for digit in "ab"]


def test_follow_the_latest() -> None:
    options = parse(["--reader-tokens", "out/readers"])
    assert options.source == FollowOptions(Path("out/readers"), None, False, None, 0, 10.0, Access())
    assert (options.look, options.plain, options.json) == (Look(Ids.NO, full=False), False, False)


def test_follow_one_of_them() -> None:
    told = ["--reader-tokens", "-", "main.3f", "--sidecar", "unix:/run/s", "--from", "7", "--patience", "2.5"]
    access = ["--sidecar-token-file", "t", "--sidecar-ca", "ca.pem"]
    options = parse([*told, *access, "--ids", "beside", "--full", "--plain"])
    assert options.source == FollowOptions(
        Path("-"), "main.3f", False, "unix:/run/s", 7, 2.5, Access(Path("t"), Path("ca.pem"))
    )
    assert (options.look, options.plain) == (Look(Ids.BESIDE, full=True), True)


def test_replay() -> None:
    told = ["--replay", "t.jsonl", "--tape", "3", "--tokenizer", "d", "--speed", "20", "--json"]
    options = parse(told)
    assert options.source == ReplayOptions(Path("t.jsonl"), 3, Path("d"), 20.0)
    assert options.json
    assert parse(["--replay", "t.jsonl", "--speed", "0"]).source == ReplayOptions(Path("t.jsonl"), 0, None, math.inf)


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ([], "give either --reader-tokens FILE"),
        (["--reader-tokens", "f", "--replay", "t"], "give either --reader-tokens FILE"),
        (["--reader-tokens", "f", "main.1", "--all"], "either TAPE_ID or --all"),
        (["--reader-tokens", "f", "--all", "--from", "3"], "--from is for one tape"),
        (["--replay", "t", "main.1"], "told by --tape N"),
        (["--replay", "t", "--speed", "fast"], "'fast' is not a number, 0 or more"),
        (["--replay", "t", "--tape", "-1"], "--tape: "),
        (["--reader-tokens", "f", "--from", "x"], "'x' is not a whole number, 0 or more"),
        (["--reader-tokens", "f", "--sidecar", "here"], "'here' is not HOST:PORT"),
        (["--reader-tokens", "f", "--sidecar-key", "k"], "--sidecar-certificate and --sidecar-key go together"),
    ],
)
def test_a_wrong_command_line_is_told(told: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(told)
    assert raised.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_reader_token_cannot_be_an_argument() -> None:
    with pytest.raises(SystemExit):
        parse(["--reader-token", "secret"])


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(["--help"])
    assert raised.value.code == 0
    told = capsys.readouterr().out
    for word in ("reader tokens:", "examples:", "exit status:", "--replay tapes.jsonl", "--all"):
        assert word in told


def test_a_line_is_there_as_soon_as_a_tape_is_open(tmp_path: Path) -> None:
    path = tmp_path / "new" / "readers"
    file = ReaderTokenFile(path)
    assert read_reader_tokens(path) == []
    file.add(TAPES[0], "127.0.0.1:1")
    assert [(each.tape, each.address) for each in read_reader_tokens(path)] == [(TAPES[0], "127.0.0.1:1")]
    file.add(TAPES[1], "unix:/run/s")
    assert [each.tape for each in read_reader_tokens(path)] == TAPES


def test_the_file_is_its_owners_alone_also_where_there_was_another(tmp_path: Path) -> None:
    path = tmp_path / "readers"
    path.write_text("old\n")
    path.chmod(0o666)
    umask = os.umask(0)
    try:
        ReaderTokenFile(path).add(TAPES[0], "h:1")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read_reader_tokens(path)) == 1


def test_lines_by_hand_need_no_address(tmp_path: Path) -> None:
    path = tmp_path / "readers"
    path.write_text("main.1 secret\n\nmain.2  other   h:2 \nmain.3 half")
    assert [(each.tape.tape_id, each.address) for each in read_reader_tokens(path)] == [
        ("main.1", None),
        ("main.2", "h:2"),
    ]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("main.1 secret"))
    assert [each.tape for each in read_reader_tokens(Path("-"))] == [OpenedTape("main.1", "secret")]


@pytest.mark.parametrize("line", ["main.1\n", "main.1 secret h:1 more\n"])
def test_a_line_that_is_none_is_told_without_the_secret(tmp_path: Path, line: str) -> None:
    path = tmp_path / "readers"
    path.write_text(f"main.0 fine\n{line}")
    with pytest.raises(ReaderTokensError, match=r"readers:2: not `TAPE_ID READER_TOKEN \[ADDRESS\]`$") as raised:
        read_reader_tokens(path)
    assert "secret" not in str(raised.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ReaderTokensError, match=r"cannot read .*: No such file"):
        read_reader_tokens(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReaderTokensError, match="it is not text"):
        read_reader_tokens(tmp_path / "binary")
    with pytest.raises(ReaderTokensError, match="cannot write to"):
        ReaderTokenFile(tmp_path)
    assert "secret" not in repr(TAPES[0])
