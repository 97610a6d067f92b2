"""Joining a node: its keeper is found, or started, and told of the new member. All of this blocks."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tokentape_executor.errors import StartFailed
from tokentape_executor.node.logs import KEEPER
from tokentape_executor.node.messages import Join, State, parse
from tokentape_executor.node.places import Place
from tokentape_executor.node.spec import NodeSpec

_KEEPER_SECONDS = 60.0
"""How long a keeper may take to listen: it imports itself, on a machine that may be busy."""
_ANSWER_SECONDS = 20.0
_LOCK_SECONDS = 120.0
_INTERVAL_SECONDS = 0.02
_LOG_TAIL_CHARACTERS = 4096

_DETACH = """
import json, subprocess, sys
log = open(sys.argv[1], "ab")
keeper = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
print(json.dumps(keeper.pid))
"""
"""Starts a command that is nobody's child, so that nothing that ends its children or its group ends it."""


class Connection:
    """A member's connection to its keeper."""

    def __init__(self, connected: socket.socket) -> None:
        """Take a socket that is connected, and close it in the end."""
        self._socket = connected
        self._file = connected.makefile("rb")

    def join(self, join: Join) -> State:
        """Join, and return the keeper's state. Raises `StartFailed` where it gives none."""
        try:
            self._socket.settimeout(_ANSWER_SECONDS)
            self._socket.sendall(join.line())
            state = next(self.states(), None)
            self._socket.settimeout(None)
        except OSError as error:
            raise StartFailed(f"the node's keeper does not answer: {error}") from error
        if state is None:
            raise StartFailed("the node's keeper ended when it was to be joined")
        return state

    def states(self) -> Iterator[State]:
        """Yield the keeper's states as they come, until it closes the connection, or is gone."""
        while line := self._file.readline():
            yield parse(State, line)

    def leave(self) -> None:
        """Leave; `states` ends when the keeper has closed the connection. From any thread."""
        self._shutdown(socket.SHUT_WR)

    def abandon(self) -> None:
        """Make `states` end at once. From any thread."""
        self._shutdown(socket.SHUT_RDWR)

    def _shutdown(self, how: int) -> None:
        # Fails where the keeper has closed it.
        with contextlib.suppress(OSError):
            self._socket.shutdown(how)

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()


def enter(spec: NodeSpec, join: Join, go_on: Callable[[], bool]) -> tuple[Connection, State]:
    """Join the node of `spec`, starting it if need be; return the connection and the first state.

    Gives up when `go_on` says so. Raises `StartFailed`, also where the keeper refuses.
    """
    place = Place.of(spec.key)
    with place.locked(go_on, _LOCK_SECONDS):
        connection = Connection(place.connect() or _start_keeper(place, spec, go_on))
        try:
            state = connection.join(join)
            if state.refused is not None:
                raise StartFailed(state.refused)
        except BaseException:
            connection.close()
            raise
        return connection, state


def _start_keeper(place: Place, spec: NodeSpec, go_on: Callable[[], bool]) -> socket.socket:
    """Start a keeper and return a connection to it. The place is locked, and has no keeper."""
    place.socket.unlink(missing_ok=True)
    place.spec.write_bytes(spec.to_json())
    log_file = (spec.log_directory or place.logs) / KEEPER
    log_file.parent.mkdir(parents=True, exist_ok=True)
    keeper = _detached(
        [sys.executable, "-P", "-m", "tokentape_executor.node.keeper", str(place.directory)], log_file=log_file
    )
    deadline = time.monotonic() + _KEEPER_SECONDS
    while (connection := place.connect()) is None:
        ended = not keeper.is_running()
        if ended or not go_on() or time.monotonic() > deadline:
            problem = "ended" if ended else "was not ready in time"
            failed = StartFailed(f"the node's keeper {problem}; its log, {log_file}, ends with:\n{_tail(log_file)}")
            if keeper.is_running():
                keeper.kill()
            place.remove()
            raise failed
        time.sleep(_INTERVAL_SECONDS)
    return connection


def _detached(command: list[str], *, log_file: Path) -> psutil.Process:
    """Start `command` as nobody's child, in a session of its own."""
    detach = [sys.executable, "-I", "-S", "-c", _DETACH, str(log_file)]
    try:
        started = subprocess.run([*detach, *command], stdout=subprocess.PIPE, check=True)
        return psutil.Process(json.loads(started.stdout))
    except (subprocess.SubprocessError, psutil.Error, ValueError) as error:
        raise StartFailed(f"the node's keeper could not be started: {error}; its log is {log_file}") from error


def _tail(log_file: Path) -> str:
    return log_file.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:].strip()
