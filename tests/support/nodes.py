"""Nodes of executors: a temporary directory of their own, members in processes of their own, what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tokentape_executor.node import NodeSpec

MEMBER = """
import asyncio, json, sys
from tokentape_executor.node import NodeMember, NodeSpec

async def main():
    member = await NodeMember.join(NodeSpec.from_json(sys.argv[1].encode()), json.loads(sys.argv[2]))
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        try:
            answer = await getattr(member, line)()
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    await asyncio.to_thread(member.leave)

asyncio.run(main())
"""
"""Joins, answers the names of the member's methods with what they return, and leaves when there are no more."""


class MemberProcess:
    """A member in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, method: str) -> Any:
        """Return what this method of the member returns."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{method}\n".encode())
        await self.process.stdin.drain()
        return json.loads(await self.process.stdout.readline())

    async def leave(self) -> None:
        """Make it leave, and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert await self.process.wait() == 0


@asynccontextmanager
async def member_process(spec: NodeSpec, sidecars: Mapping[str, str]) -> AsyncGenerator[MemberProcess]:
    """Start a member; on leaving, end it if it has not ended."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MEMBER, spec.to_json().decode(), json.dumps(dict(sidecars))),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield MemberProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contextmanager
def own_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """Let nodes have a temporary directory in which nothing is but theirs; in the end nothing may be left of them."""
    root = Path(tempfile.mkdtemp(prefix="nd-", dir="/tmp"))
    with monkeypatch.context() as patched:
        patched.setenv("TMPDIR", str(root))
        patched.setattr(tempfile, "tempdir", str(root))
        try:
            yield root
            left = processes_of(root)
            psutil.wait_procs(left, timeout=5)
            assert [process.cmdline() for process in left if is_alive(process)] == []
            assert not files_of(root), files_of(root)
        finally:
            for process in processes_of(root):
                process.kill()
            shutil.rmtree(root, ignore_errors=True)


def files_of(root: Path) -> list[Path]:
    return list(root.rglob("*"))


def processes_of(root: Path) -> list[psutil.Process]:
    """All processes whose environment or command names this temporary directory, but for this one and its tests."""
    return [
        process
        for process in psutil.process_iter()
        if str(root) in words_of(process) and process.pid != os.getpid() and is_alive(process)
    ]


def words_of(process: psutil.Process) -> str:
    """Its command line; nothing of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended; whoever is to reap it may take its time."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def keepers(root: Path) -> list[psutil.Process]:
    return [process for process in processes_of(root) if "tokentape_executor.node.keeper" in words_of(process)]


def bridges(root: Path) -> list[psutil.Process]:
    """The bridges themselves, not their leashes."""
    return [
        process
        for process in processes_of(root)
        if "import bridge" in words_of(process) and "_leash.py" not in words_of(process)
    ]
