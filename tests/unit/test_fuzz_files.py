"""Files of any content: read, or refused by the reader's own error; never another, and never in part.

`TOKENTAPE_EFFORT=100 pytest --timeout 0 tests/unit/test_fuzz_files.py` tries for hours.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.effort import fuzzing
from support.fuzzed_messages import edited, edits, messages
from support.scripted import call, script, tokens
from tokentape.secret_file import SecretFile, UnusableSecretFile
from tokentape.v1 import generation_pb2, tape_pb2
from tokentape_bridge.archive import ArchiveError, unpack
from tokentape_bridge.settings import parse_settings as bridge_settings
from tokentape_executor.errors import ExecutorError
from tokentape_executor.tape_file import StoredTape, TapeFileError, append_tape, read_tapes
from tokentape_sidecar.script import Script, ScriptError
from tokentape_sidecar.settings import parse_settings as sidecar_settings

BOUNDED = fuzzing(100)
TEXT_OF_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())


def any_content(good: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, any JSON, and what is nearly `good`."""
    return st.binary(max_size=200) | TEXT_OF_JSON | edits().map(lambda changes: edited(good, changes))


def refusal(action: Callable[[], object], kind: type[Exception]) -> str | None:
    """What an error of this kind says of the action; `None` where there is none."""
    try:
        action()
    except kind as error:
        return str(error)
    return None


def is_read_or_refused(
    file: Path, good: bytes, read: Callable[[Path], object], kind: type[Exception], says: str
) -> None:
    """`good` is read; other contents are too, or refused by an error of this kind that names `says`."""
    file.write_bytes(good)
    read(file)

    @given(content=any_content(good))
    @BOUNDED
    def holds(content: bytes) -> None:
        file.write_bytes(content)
        message = refusal(lambda: read(file), kind)
        assert message is None or says in message

    holds()


def test_scripts(tmp_path: Path) -> None:
    good = script(call(tokens(1, 2, logprobs=[{"1": -1.0}, {"2": -2.0}], finish="stop"), expect=[1]), repeat=True)
    file = tmp_path / "script.json"
    is_read_or_refused(file, json.dumps(good).encode(), Script.load, ScriptError, says=str(file))


def stored(entries: list[Any]) -> StoredTape:
    return StoredTape.of("main." + "0" * 32, generation_pb2.GetModelResponse(name="toy"), entries)


def good_entries() -> list[tape_pb2.TapeEntry]:
    started = tape_pb2.TapeEntry.CallStarted(call_id="a", prompt_token_ids=[1], prompt_token_count=1)
    sampled = tape_pb2.TapeEntry.TokensSampled(call_id="a", token_ids=[5], logprobs=[-1])
    return [
        tape_pb2.TapeEntry(sequence=0, call_started=started),
        tape_pb2.TapeEntry(sequence=1, tokens_sampled=sampled),
    ]


def test_tape_files(tmp_path: Path) -> None:
    file = tmp_path / "tapes.jsonl"
    append_tape(file, stored(good_entries()))
    is_read_or_refused(file, file.read_bytes(), lambda it: list(read_tapes(it)), TapeFileError, says=str(file))


def test_tapes_of_any_entries_are_assembled_or_refused() -> None:
    @given(entries=st.lists(messages(tape_pb2.TapeEntry.DESCRIPTOR), max_size=6))
    @BOUNDED
    def holds(entries: list[Any]) -> None:
        for position, entry in enumerate(entries):
            entry.sequence = position
        assert refusal(stored(entries).trajectory, ExecutorError) != ""

    holds()


def archive(names: list[str], content: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def is_unpacked_or_refused(content: bytes, directory: Path) -> None:
    before = {file for file in directory.parent.rglob("*") if directory not in file.parents}
    assert refusal(lambda: unpack(content, directory), ArchiveError) != ""
    assert {file for file in directory.parent.rglob("*") if directory not in file.parents} == before
    for file in directory.iterdir():
        assert file.is_file()
        assert not file.is_symlink()
        file.unlink()


def test_tokenizer_archives(tmp_path: Path) -> None:
    directory = tmp_path / "unpacked"
    directory.mkdir()
    tar = archive(["tokenizer.json", "config.json"], b"{}")
    # Within the tar, where a checksum does not find every change; and within the compressed bytes.
    contents = any_content(tar).map(lambda it: gzip.compress(it, mtime=0)) | any_content(gzip.compress(tar, mtime=0))

    @given(content=contents)
    @BOUNDED
    def holds(content: bytes) -> None:
        is_unpacked_or_refused(content, directory)

    holds()


def test_names_in_tokenizer_archives(tmp_path: Path) -> None:
    directory = tmp_path / "unpacked"
    directory.mkdir()
    name = st.text(st.sampled_from("./\\ab~\x00é"), min_size=1, max_size=20) | st.just("tokenizer.json")

    @given(names=st.lists(name, min_size=1, max_size=3))
    @BOUNDED
    def holds(names: list[str]) -> None:
        is_unpacked_or_refused(gzip.compress(archive(names, b"{}")), directory)

    holds()


def test_secret_files(tmp_path: Path) -> None:
    is_read_or_refused(
        tmp_path / "secret",
        b"secret\n",
        lambda it: SecretFile(it, "--token-file").show(),
        UnusableSecretFile,
        says="--token-file",
    )


CONFIGS: dict[str, tuple[Callable[[list[str]], object], bytes]] = {
    "sidecar": (
        sidecar_settings,
        b'engine = "scripted"\nscript = "a"\ntokenizer = "b"\ngrace-seconds = 3\nlisten = "127.0.0.1:1"\n',
    ),
    "bridge": (bridge_settings, b'sidecar = ["a=127.0.0.1:1"]\nlisten = "127.0.0.1:2"\nno-continuation = true\n'),
}


@pytest.mark.parametrize("program", CONFIGS)
def test_config_files(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parse, good = CONFIGS[program]

    def read(file: Path) -> None:
        try:
            parse(["--config", str(file)])
        except SystemExit as exit_:
            raise Refused(f"{exit_.code} {capsys.readouterr().err}") from None

    is_read_or_refused(tmp_path / "config.toml", good, read, Refused, says="error: ")


class Refused(Exception):
    """What a program says of a wrong command line."""
