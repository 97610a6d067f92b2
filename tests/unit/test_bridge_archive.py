from __future__ import annotations

import hashlib
import io
import random
import tarfile
from pathlib import Path

import pytest

from tokentape_bridge import archive
from tokentape_bridge.archive import ArchiveError, unpack, verify


def packed(*members: tuple[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return data.getvalue()


def packed_odd(kind: bytes, name: str = "odd") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.type = kind
        member.linkname = "/etc/passwd"
        tar.addfile(member)
    return data.getvalue()


def test_plain_files_come_out(tmp_path: Path) -> None:
    unpack(packed(("tokenizer.json", b"{}"), ("chat_template.jinja", b"x")), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"x",
    }


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "..", ".", "a\\b", "tokenization_x.py", "x.so", "x.txt"])
def test_odd_names_stay_inside(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "deep" / "inside"
    inside.mkdir(parents=True)
    with pytest.raises(ArchiveError):
        unpack(packed((name, b"x")), inside)
    assert list(inside.iterdir()) == []
    assert [path.name for path in tmp_path.rglob("*")] == ["deep", "inside"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_only_files(tmp_path: Path, kind: bytes) -> None:
    with pytest.raises(ArchiveError, match="odd"):
        unpack(packed_odd(kind), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_small_archive_of_much_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(ArchiveError, match="1000 bytes"):
        unpack(packed(("vocab.json", b"0" * 600), ("vocab.txt", b"0" * 600)), tmp_path)


def test_headers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 100_000)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("vocab.json")
        member.pax_headers = {"comment": "a" * 1_000_000}
        tar.addfile(member)
    with pytest.raises(ArchiveError, match="100000 bytes"):
        unpack(data.getvalue(), tmp_path)


def test_damaged_data_is_refused(tmp_path: Path) -> None:
    data = bytearray(packed(("vocab.json", random.Random(0).randbytes(100_000).hex().encode())))
    data[50_000:50_200] = b"\xff" * 200
    with pytest.raises(ArchiveError, match="cannot be read"):
        unpack(bytes(data), tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"no tar", packed(("vocab.json", b"0" * 9999))[:-20]], ids=["empty", "text", "cut"]
)
def test_broken_archives_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ArchiveError, match="cannot be read"):
        unpack(data, tmp_path)


def test_size_and_checksum() -> None:
    sha256 = hashlib.sha256(b"data").hexdigest()
    verify(b"data", sha256=sha256, size_bytes=4)
    with pytest.raises(ArchiveError, match="4 bytes where 5"):
        verify(b"data", sha256=sha256, size_bytes=5)
    with pytest.raises(ArchiveError, match="SHA-256"):
        verify(b"dada", sha256=sha256, size_bytes=4)
