"""The keeper: `python -m tokentape_executor.node.keeper DIRECTORY`, the process that has a node's bridge and Gym.

`entering.start_keeper` starts it, in a session of its own, and is gone. It ends when its last member has left, when
nobody joins for `JOIN_SECONDS`, when bridge or Gym do not start at all, and on SIGTERM. It then does, in this order,
holding the directory's lock:

1. removes its socket, so that nobody else joins (whoever wants to waits for the lock),
2. stops bridge and Gym, at the same time,
3. removes its directory, and what killed members have left,
4. exits; the connections of those that still wait end with it, so that nothing is left when they learn of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tokentape.logs import configure_logging
from tokentape_executor import private_socket
from tokentape_executor.errors import StartFailed
from tokentape_executor.node.membership import Membership
from tokentape_executor.node.places import Place, sweep
from tokentape_executor.node.services import keep_services
from tokentape_executor.node.spec import NodeSpec

if TYPE_CHECKING:
    from filelock import BaseFileLock

_logger = logging.getLogger(__name__)

JOIN_SECONDS = 30.0
"""How long it waits for its first member."""
_LOCK_INTERVAL_SECONDS = 0.02
_LOOK_SECONDS = 1.0
"""How often it looks whether nobody has come, of which nothing tells."""


class Keeper:
    """One node's bridge and Gym, and its members."""

    def __init__(self, place: Place, spec: NodeSpec) -> None:
        """Take the place, whose socket is not there yet."""
        self._place = place
        self._spec = spec
        self._join_deadline = time.monotonic() + JOIN_SECONDS
        self._asked_to_end = False
        self._changed = asyncio.Event()
        """Set when it may be over."""
        self._members = Membership(self._take_table)

    async def run(self) -> NoReturn:
        """Serve members until it is over; ends the process."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Fails where another keeper is there already: bound by hand, since asyncio would take its place.
        listener.bind(str(self._place.socket))
        write_table(self._place.sidecars, {})
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end_soon)
        server = await asyncio.start_unix_server(self._members.serve, sock=listener)
        services = asyncio.create_task(keep_services(self._place, self._spec, self._members))
        services.add_done_callback(lambda _: self._changed.set())
        # Held to the end: nobody joins any more.
        self._lock = await self._over(services)
        server.close()
        self._place.socket.unlink(missing_ok=True)
        services.cancel()
        await asyncio.gather(services, return_exceptions=True)
        await self._members.tell_all()
        # A member that was killed could not.
        private_socket.sweep()
        self._place.remove()
        logging.shutdown()
        # At once, with connections and lock open: who sees them end, sees that this process has ended too.
        os._exit(0)

    def _end_soon(self) -> None:
        self._asked_to_end = True
        self._changed.set()

    async def _over(self, services: asyncio.Task[None]) -> BaseFileLock:
        """Return when it is over, with the directory's lock."""
        while True:
            await self._until(lambda: self._is_over(services))
            if services.done():
                self._members.fail(_failure(services))
            lock = self._place.try_lock()
            # Nobody joins while we have it; but somebody may have, before. A failure, or SIGTERM, is for them too.
            if lock is not None and self._is_over(services):
                return lock
            if lock is not None:
                lock.release()
            await asyncio.sleep(_LOCK_INTERVAL_SECONDS)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._changed.wait()

    def _is_over(self, services: asyncio.Task[None]) -> bool:
        return services.done() or self._asked_to_end or self._is_alone()

    def _is_alone(self) -> bool:
        waiting_for_the_first = not self._members.had_any and time.monotonic() < self._join_deadline
        return not self._members.any and not waiting_for_the_first

    def _take_table(self, sidecars: Mapping[str, str]) -> None:
        write_table(self._place.sidecars, sidecars)
        self._changed.set()


def write_table(file: Path, sidecars: Mapping[str, str]) -> None:
    """Replace the bridge's table as a whole."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(dict(sidecars)))
    draft.replace(file)


def _failure(services: asyncio.Task[None]) -> str:
    error = services.exception()
    if not isinstance(error, StartFailed):
        _logger.error("the keeper failed", exc_info=error)
        return f"the node's keeper failed: {type(error).__name__}: {error}"
    return str(error)


def main() -> None:
    """Run a keeper in the directory that the command line names."""
    os.umask(0o077)
    configure_logging("info")
    # It logs every request.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    place = Place(Path(sys.argv[1]))
    spec = NodeSpec.from_json(place.spec.read_bytes())
    _logger.info("keeping %s", spec)
    with contextlib.suppress(OSError):
        sweep()
    asyncio.run(Keeper(place, spec).run())


if __name__ == "__main__":
    main()
