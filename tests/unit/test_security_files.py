"""Secrets in files and in objects, and the tokenizer's files: a checkpoint may be anybody's."""

from __future__ import annotations

import gc
import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from support.certificates import secret_file
from support.scripted import TOY_TOKENIZER
from tokentape.secret_file import SecretFile, UnusableSecretFile
from tokentape_bridge.archive import unpack
from tokentape_bridge.tokenizer import Tokenizer, TokenizerError
from tokentape_executor.log_redaction import hide_tapes
from tokentape_executor.private_socket import PrivateSocket, sweep
from tokentape_executor.reader_tokens import ReadableTape
from tokentape_executor.rollout_client import RolloutClient
from tokentape_executor.tape_client import OpenedTape
from tokentape_sidecar.tape import Tape, TapeLimits, TapePolicy
from tokentape_sidecar.tokenizer_archive import pack_tokenizer

TAPE_ID = "main.0123456789abcdef0123456789abcdef"


def test_all_secrets_are_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what Python has for that, and each of them, also after one that fits."""
    compared: list[object] = []
    compare: Callable[[bytes, bytes], bool] = secrets.compare_digest

    def noting(shown: bytes, known: bytes) -> bool:
        compared.append(known)
        return compare(shown, known)

    monkeypatch.setattr(secrets, "compare_digest", noting)
    file = SecretFile(secret_file(tmp_path / "tokens", "first", "second", "third"), "--token-file")
    assert file.accept(b"first")
    assert compared == [b"first", b"second", b"third"]
    assert not file.accept(b"fourth")
    assert not file.accept(b"")


@pytest.mark.parametrize(("mode", "told"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_may_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, told: bool
) -> None:
    file = secret_file(tmp_path / "token", "the-secret")
    file.chmod(mode)
    for _ in range(2):
        SecretFile(file, "--token-file")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ([f"--token-file {file} can be read by others (mode {mode:03o}): chmod 600 it"] if told else [])
    assert "the-secret" not in caplog.text


@pytest.mark.parametrize("content", ["", "\n \n", "schlüssel\n", "a\x00b\n"])
def test_what_is_no_secret_is_refused_without_being_told(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(UnusableSecretFile) as caught:
        SecretFile(file, "--token-file")
    assert str(caught.value).startswith(f"--token-file {file} cannot be used: it holds ")
    assert "schl" not in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "token", "the-secret")
    secrets_of_file = SecretFile(file, "--token-file")
    file.unlink()
    os.mkfifo(file)
    assert secrets_of_file.accept(b"the-secret")
    with pytest.raises(UnusableSecretFile, match=r"cannot be used: it is a pipe$"):
        SecretFile(file, "--token-file")


async def test_objects_do_not_tell_their_secrets() -> None:
    opened = OpenedTape(TAPE_ID, "the-reader-token")
    tape = Tape(TAPE_ID, TapeLimits(), TapePolicy())
    client = RolloutClient.connect("http://127.0.0.1:9/v1", tape_id=TAPE_ID, model="m", api_key="the-key")
    for told in (opened, ReadableTape(opened, None), tape, client):
        for secret in (TAPE_ID, "the-reader-token", tape.reader_token, "the-key"):
            assert secret not in f"{told!r} {told}"
    await client.close()


def test_a_sidecar_of_ones_own_is_where_only_this_user_can_enter() -> None:
    own = PrivateSocket()
    directory, remove = own.address.path.parents[1], own.remove
    del own
    gc.collect()
    # It lasts as long as there is somebody to remove it.
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.owner() == Path("/proc/self").owner()
    sweep()
    assert directory.exists()
    remove()
    assert not directory.exists()


def test_what_a_killed_process_left_of_its_socket_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os; from tokentape_executor.private_socket import PrivateSocket as P; p = P(); os._exit(9)"
    # Of a short name, as a socket's path must be.
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": temporary}, check=False)
        assert len(os.listdir(temporary)) == 1
        sweep()
        assert os.listdir(temporary) == []


@pytest.mark.parametrize("logger", ["httpx", "httpx2", "httpcore.http11", "httpcore2.http11", "openai._base_client"])
def test_other_libraries_log_no_tapes_id(caplog: pytest.LogCaptureFixture, logger: str) -> None:
    hide_tapes()
    with caplog.at_level(logging.DEBUG, logger):
        logging.getLogger(logger).debug("HTTP Request: %s http://h:1/tapes/%s/v1", "POST", TAPE_ID)
        logging.getLogger(logger).debug("no tape: %s", {"a": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "HTTP Request: POST http://h:1/tapes/main.…/v1",
        "no tape: {'a': 1}",
    ]


def test_a_checkpoints_code_does_not_travel_and_is_not_run(tmp_path: Path) -> None:
    """Not even where its configuration asks for it."""
    checkpoint, unpacked, ran = tmp_path / "checkpoint", tmp_path / "unpacked", tmp_path / "ran"
    checkpoint.mkdir()
    unpacked.mkdir()
    for file in TOY_TOKENIZER.iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    code = f"open({str(ran)!r}, 'w').close()\n"
    for name in ("tokenization_evil.py", "configuration_evil.py", "__init__.py", "conftest.pyc"):
        (checkpoint / name).write_text(code)
    auto_map = {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(auto_map | {"tokenizer_class": "Evil"}))
    (checkpoint / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.Evil"}})
    )

    unpack(pack_tokenizer(checkpoint), unpacked)
    assert not [file for file in unpacked.iterdir() if file.suffix in {".py", ".pyc"}]
    for directory in (unpacked, checkpoint):
        # Beside its code, or without it: it is refused, or read as data.
        try:
            Tokenizer.load(directory, "0" * 64)
        except TokenizerError as error:
            assert "transformers cannot load" in str(error)  # noqa: PT017 - either is right
    assert not ran.exists()
    assert not [name for name in sys.modules if "evil" in name]
