"""Ends an engine's processes when the sidecar died without doing it: `python -I guard.py SIDECAR PID...`.

vLLM's core and workers are processes of their own. A core without work waits for the next request for ever, whether or
not anybody lives who could send one, and keeps the accelerator's memory: after a SIGKILL of the sidecar no other could
start there. The kernel's PR_SET_PDEATHSIG would have to be set in each of them.

Processes are told by descriptors that are opened while the sidecar lives, never by a number that may have passed on to
another one. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import psutil

_GRACE_SECONDS = 2.0


class Guard:
    """Sees to it that the present descendants of this process end soon after it, however it ends."""

    def __init__(self) -> None:
        children = [
            str(child.pid)
            for child in psutil.Process().children(recursive=True)
            # Python's own, which cleans up after the others and then ends by itself.
            if not any("resource_tracker" in argument for argument in child.cmdline())
        ]
        command = [sys.executable, "-I", __file__, str(os.getpid()), *children]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def close(self) -> None:
        """Guard no longer."""
        self._process.kill()
        self._process.wait()


def _open(pids: list[int]) -> list[int]:
    handles: list[int] = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return handles


def _end(handles: list[int], number: signal.Signals) -> list[int]:
    """Send a signal; return which of them it has not ended within the grace period."""
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)
    deadline = time.monotonic() + _GRACE_SECONDS
    while handles and (seconds := deadline - time.monotonic()) > 0:
        ended = select.select(handles, [], [], seconds)[0]
        handles = [handle for handle in handles if handle not in ended]
    return handles


def main(arguments: list[str]) -> None:
    """Wait for the end of the process of the first number, then end those of the others."""
    sidecar, *pids = map(int, arguments)
    handles, ends = _open(pids), _open([sidecar])
    # Where it has died already, this process has another parent.
    if ends and os.getppid() == sidecar:
        select.select(ends, [], [])
    _end(_end(handles, signal.SIGTERM), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
