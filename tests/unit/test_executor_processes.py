"""Child processes on real commands: they start, they tell why they did not, and nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tokentape_executor.errors import StartFailed
from tokentape_executor.processes import ChildProcess
from tokentape_executor.services import ServiceGroup

FAMILY = """
import os, signal, subprocess, sys, time
# A child in a session of its own whose parent goes at once, and one that does not mind SIGTERM.
orphaning = "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True)"
subprocess.Popen([sys.executable, "-c", orphaning]).wait()
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
time.sleep(0.3)
open(sys.argv[1], "w").write("{\\"address\\": \\"127.0.0.1:1\\", \\"pid\\": 1}")
time.sleep(300)
"""
"""A command with three processes, in three sessions, one of them an orphan."""


async def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def start(tmp_path: Path, script: str, *arguments: str, grace_seconds: float = 0.5) -> ChildProcess:
    return ChildProcess.start(
        "the command",
        [sys.executable, "-c", script, *arguments],
        log_file=tmp_path / "logs" / "command.log",
        grace_seconds=grace_seconds,
    )


@pytest.fixture(autouse=True)
def others() -> None:
    """Note the processes that other tests keep for the session."""
    _others.clear()
    _others.update(psutil.Process().children(recursive=True))


_others: set[psutil.Process] = set()


def descendants() -> list[psutil.Process]:
    """The processes below this one that this test started."""
    return [child for child in psutil.Process().children(recursive=True) if child not in _others]


async def start_family(tmp_path: Path) -> tuple[ChildProcess, list[psutil.Process]]:
    """Start the family; return it and all its processes."""
    process = start(tmp_path, FAMILY, str(tmp_path / "ready"))
    assert await process.wait_for_ready_file(tmp_path / "ready", timeout_seconds=20) == "127.0.0.1:1"
    family = descendants()
    assert len(family) == 4, family
    assert len({os.getsid(member.pid) for member in family}) == 3
    return process, family


async def test_stop_ends_every_descendant_whatever_its_session(tmp_path: Path) -> None:
    process, family = await start_family(tmp_path)
    began = time.monotonic()
    process.stop()

    assert time.monotonic() - began < 3.0
    assert not process.running
    assert psutil.wait_procs(family, timeout=0)[1] == []
    process.stop()


async def test_a_command_that_dies_takes_the_rest_with_it(tmp_path: Path) -> None:
    process, family = await start_family(tmp_path)
    (leash,) = (child for child in psutil.Process().children() if child not in _others)
    command = next(child for child in leash.children() if "stubborn =" in " ".join(child.cmdline()))
    command.kill()

    await wait_until(lambda: not process.running)
    assert psutil.wait_procs(family, timeout=0)[1] == []
    with pytest.raises(StartFailed, match=f"the command ended with status {128 + signal.SIGKILL}"):
        await process.wait_for_ready_file(tmp_path / "other", timeout_seconds=1)


async def test_a_leash_that_is_killed_leaves_nothing_behind_after_stop(tmp_path: Path) -> None:
    process, family = await start_family(tmp_path)
    (leash,) = (child for child in psutil.Process().children() if child not in _others)
    leash.kill()

    await wait_until(lambda: not process.running)
    process.stop()
    assert not [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]


async def test_the_death_of_this_process_ends_everything(tmp_path: Path) -> None:
    trainer = f"""
import asyncio, os, sys
from pathlib import Path
from tokentape_executor.processes import ChildProcess
scratch = Path({str(tmp_path)!r}) / "scratch"
scratch.mkdir()
process = ChildProcess.start("c", [sys.executable, "-c", {FAMILY!r}, {str(tmp_path / "ready")!r}],
    log_file=Path({str(tmp_path)!r}) / "log", scratch=scratch, grace_seconds=0.5)
asyncio.run(process.wait_for_ready_file(Path({str(tmp_path / "ready")!r}), timeout_seconds=20))
print("ready", flush=True)
os.read(0, 1)
"""
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", trainer), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"ready\n"
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) == 4
    parent.kill()
    await parent.wait()

    await wait_until(lambda: not any(member.is_running() for member in family))
    await wait_until(lambda: not (tmp_path / "scratch").exists())


async def test_a_command_gets_sigterm_and_its_grace(tmp_path: Path) -> None:
    script = """
import pathlib, signal, sys, time
def stop(number, frame):
    time.sleep(0.5)
    pathlib.Path(sys.argv[2]).write_text("done")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).write_text('{"address": "a:1"}')
time.sleep(300)
"""
    process = start(tmp_path, script, str(tmp_path / "ready"), str(tmp_path / "done"), grace_seconds=5.0)
    await process.wait_for_ready_file(tmp_path / "ready", timeout_seconds=10)
    process.stop()

    assert (tmp_path / "done").read_text() == "done"


async def test_a_command_that_fails_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = start(tmp_path, "import sys; print('x' * 10_000); sys.exit('the disk is full')")
    with pytest.raises(StartFailed) as failure:
        await process.wait_for_ready_file(tmp_path / "ready", timeout_seconds=10)

    message = str(failure.value)
    assert message.startswith("the command ended with status 1 before its ready file; its log, ")
    assert message.endswith("the disk is full")
    assert len(message) < 5000


async def test_a_command_that_is_not_ready_in_time_is_told(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(300)")
    try:
        with pytest.raises(StartFailed, match=r"was not ready after 0\.3 s: no its ready file"):
            await process.wait_for_ready_file(tmp_path / "ready", timeout_seconds=0.3)
    finally:
        process.stop()


async def test_a_program_that_does_not_exist_is_told(tmp_path: Path) -> None:
    process = ChildProcess.start("ghost", [str(tmp_path / "ghost")], log_file=tmp_path / "log")
    with pytest.raises(StartFailed, match=r"(?s)ghost ended with status 1 .*No such file"):
        await process.wait_for_ready_file(tmp_path / "ready", timeout_seconds=10)


async def test_a_group_ends_its_members_together_and_removes_its_directory(tmp_path: Path) -> None:
    group = ServiceGroup(None)
    for name in ("one", "two", "three"):
        group.add(
            ChildProcess.start(
                name, ["sleep", "300"], log_file=group.log_file(name), scratch=tmp_path / name, grace_seconds=3.0
            )
        )
    await wait_until(lambda: len(descendants()) == 6)
    began = time.monotonic()
    group.stop()
    group.stop()

    assert time.monotonic() - began < 3.0
    assert descendants() == []
    assert not group.directory.exists()


async def test_kept_logs_outlive_the_group(tmp_path: Path) -> None:
    group = ServiceGroup(tmp_path / "logs")
    process = ChildProcess.start("echo", ["echo", "hello"], log_file=group.log_file("echo"))
    group.add(process)
    await wait_until(lambda: not process.running)
    group.stop()

    assert (tmp_path / "logs" / "echo.log").read_text() == "hello\n"
