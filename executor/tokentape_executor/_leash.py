"""Runs one command on a leash: `python -P _leash.py PARENT GRACE SCRATCH COMMAND...`.

`processes.ChildProcess` starts this file, as the leader of a new session. It runs the command and ends it, with all
that it has started, as soon as one of three things happens:

- the command ends by itself (its servers must not outlive it),
- SIGTERM arrives (`ChildProcess.stop`),
- the process PARENT dies, however it dies. So a SIGKILL of the trainer leaves nothing behind. The kernel's own
  PR_SET_PDEATHSIG would not do: it is bound to the thread that forked, and reaches only one process.

The command gets SIGTERM and GRACE seconds; what it leaves behind then gets SIGTERM and a moment, and SIGKILL. "All that
it has started" is exact, whatever sessions and process groups those processes made (Ray's do): the leash adopts every
orphan below it, so that they are its descendants for good, and reaps them. At last the directory SCRATCH is removed (an
empty SCRATCH: none). The exit status is the command's.

It is run by path, without its package, so that it starts fast and needs nothing but psutil. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_LEFT_BEHIND_SECONDS = 0.5
_ROUND_SECONDS = 0.05


def _adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _wakeups() -> int:
    """Return a file descriptor from which the numbers of arriving signals can be read, one byte each."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        # Handlers, not SIG_IGN: the command would inherit that.
        signal.signal(number, lambda _number, _frame: None)
    return read


class _Leash:
    """One running command and its descendants."""

    def __init__(self, command: list[str], parent_fd: int, wakeups: int) -> None:
        self._wakeups = wakeups
        self._poll = select.poll()
        self._poll.register(parent_fd, select.POLLIN)
        self._poll.register(wakeups, select.POLLIN)
        self._parent_fd = parent_fd
        self._command = os.posix_spawnp(command[0], command, os.environ)
        self.status: int | None = None
        """The command's exit status, once it has ended: 128 + n where signal n ended it."""

    def wait(self) -> None:
        """Return when the command or the parent has ended, or SIGTERM has come."""
        while self.status is None:
            ready = {fd for fd, _ in self._poll.poll()}
            if self._parent_fd in ready or signal.SIGTERM in os.read(self._wakeups, 4096):
                return
            self._reap()

    def end(self, grace_seconds: float) -> None:
        """End the command and all its descendants; return when none is left."""
        if self.status is None:
            os.kill(self._command, signal.SIGTERM)
            deadline = time.monotonic() + grace_seconds
            while self.status is None and time.monotonic() < deadline:
                self._pause()
        told: set[psutil.Process] = set()
        deadline = time.monotonic() + _LEFT_BEHIND_SECONDS
        while descendants := set(psutil.Process().children(recursive=True)):
            overdue = time.monotonic() > deadline
            for process in descendants if overdue else descendants - told:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL if overdue else signal.SIGTERM)
            told |= descendants
            self._pause()

    def _pause(self) -> None:
        """Let a child end, or a moment pass; reap."""
        select.select([self._wakeups], [], [], _ROUND_SECONDS)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeups, 4096)
        self._reap()

    def _reap(self) -> None:
        """Take the exit status of every child that has ended."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if found[0] == self._command:
                    code = os.waitstatus_to_exitcode(found[1])
                    self.status = code if code >= 0 else 128 - code


def main(arguments: list[str]) -> int:
    """Run the command that `arguments` names; return its exit status."""
    parent, grace, scratch, *command = arguments
    wakeups = _wakeups()
    _adopt_orphans()
    try:
        parent_fd = os.pidfd_open(int(parent))
        if os.getppid() != int(parent):
            return 1
        leash = _Leash(command, parent_fd, wakeups)
        leash.wait()
        leash.end(float(grace))
        return 1 if leash.status is None else leash.status
    finally:
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
