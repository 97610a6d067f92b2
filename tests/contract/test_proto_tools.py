"""The contract passes its linters, and the committed code is what it generates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

BUF = str(Path(sys.executable).with_name("buf"))


@pytest.mark.parametrize("arguments", [["lint"], ["format", "--diff", "--exit-code"], ["build"]])
def test_buf_has_nothing_to_say(arguments: list[str], checkout: Path) -> None:
    done = subprocess.run([BUF, *arguments], cwd=checkout, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_lint_covers_comments_and_has_no_exceptions(checkout: Path) -> None:
    config = (checkout / "buf.yaml").read_text()
    assert "- STANDARD" in config
    assert "- COMMENTS" in config
    assert "ignore" not in config
    protos = sorted((checkout / "proto" / "tokentape").rglob("*.proto"))
    assert protos
    assert not [proto for proto in protos if "buf:lint" in proto.read_text()]


def generate(checkout: Path, *options: str) -> None:
    protos = [str(path) for path in (checkout / "proto" / "tokentape" / "v1").glob("*.proto")]
    includes = [f"-I{checkout / 'proto'}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
    arguments = [sys.executable, "-m", "grpc_tools.protoc", *includes, *options, *protos]
    bin_directory = str(Path(sys.executable).parent)
    subprocess.run(arguments, check=True, env={"PATH": f"{bin_directory}:/usr/bin:/bin"})


def test_the_committed_code_is_what_the_contract_generates(checkout: Path, tmp_path: Path) -> None:
    kinds = ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")
    generate(checkout, *[f"--{kind}={tmp_path}" for kind in kinds])
    fresh, committed = tmp_path / "tokentape" / "v1", checkout / "proto" / "python" / "tokentape" / "v1"
    names = {path.name for path in fresh.iterdir()}
    assert names == {path.name for path in committed.glob("*_pb2*")}
    assert len(names) == 16
    for name in names:
        assert (fresh / name).read_text() == (committed / name).read_text(), f"{name} differs; run: make proto"


def test_every_service_method_message_and_field_has_a_comment(checkout: Path, tmp_path: Path) -> None:
    """As buf's COMMENTS wants it, counted here so that the rule cannot be switched off unseen."""
    generate(checkout, f"--descriptor_set_out={tmp_path / 'set'}", "--include_source_info")
    descriptors = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "set").read_bytes())
    commented, missing = 0, list[str]()
    for file in descriptors.file:
        for location in file.source_code_info.location:
            if location.path and is_declaration(list(location.path)):
                if location.leading_comments.strip():
                    commented += 1
                else:
                    missing.append(f"{file.name}:{location.span[0] + 1}")
    assert missing == []
    assert commented > 200


# Where field numbers of descriptor.proto lead from what they are declared in: (kind, field number) to kind.
INTO = {
    ("file", 4): "message",
    ("file", 5): "enum",
    ("file", 6): "service",
    ("message", 2): "field",
    ("message", 3): "message",
    ("message", 4): "enum",
    ("message", 8): "oneof",
    ("enum", 2): "value",
    ("service", 2): "method",
}


def is_declaration(path: list[int]) -> bool:
    """Whether a source location's path is that of a declaration, rather than of a part of one."""
    if len(path) % 2:
        return False
    kind: str | None = "file"
    for number in path[::2]:
        kind = INTO.get((kind or "", number))
    return kind is not None
