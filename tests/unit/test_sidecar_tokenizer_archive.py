"""The tokenizer's archive: its files, no code, the same bytes each time."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from tokentape_sidecar.errors import NotFound
from tokentape_sidecar.tokenizer_archive import TOKENIZER_FILES, pack_tokenizer


def unpacked(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        files: dict[str, bytes] = {}
        for member in tar.getmembers():
            assert member.isreg()
            assert "/" not in member.name
            content = tar.extractfile(member)
            assert content is not None
            files[member.name] = content.read()
        return files


def fill(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"content of {name}")


def test_the_archive_holds_the_tokenizers_files_and_nothing_else(tmp_path: Path) -> None:
    own = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
    other = ("model.safetensors", "tokenization_custom.py", "modeling_custom.py", "README.md", "sub/tokenizer.json")
    fill(tmp_path, *own, *other)
    assert unpacked(pack_tokenizer(tmp_path)) == {name: f"content of {name}".encode() for name in own}


def test_no_code_is_among_the_files_that_may_travel() -> None:
    assert not [name for name in TOKENIZER_FILES if name.endswith((".py", ".so", ".pkl", ".bin"))]


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    fill(first, "tokenizer.json", "config.json")
    fill(second, "config.json", "tokenizer.json")
    os.utime(second / "config.json", (1, 1))
    (second / "tokenizer.json").chmod(0o600)
    assert pack_tokenizer(first) == pack_tokenizer(second)
    (second / "config.json").write_text("other")
    assert pack_tokenizer(first) != pack_tokenizer(second)


@pytest.mark.parametrize("names", [(), ("config.json",), ("chat_template.jinja", "generation_config.json")])
def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    fill(tmp_path, *names)
    with pytest.raises(NotFound, match=f"there is no tokenizer in {tmp_path}"):
        pack_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "vocab.txt"])
def test_any_kind_of_tokenizer_will_do(tmp_path: Path, name: str) -> None:
    fill(tmp_path, name)
    assert unpacked(pack_tokenizer(tmp_path)) == {name: f"content of {name}".encode()}
