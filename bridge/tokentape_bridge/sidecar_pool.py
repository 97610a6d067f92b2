"""Which sidecar serves a request: the one that its tape id names, else the least busy one that has its model.

The table of sidecars may change at any time (`sidecar_file.py`); every request goes by the table of its moment. A
sidecar that has left the table gets no new request, and its connection is closed when those that it serves have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

from tokentape.access import OPEN, Access
from tokentape.v1.generation_pb2 import GetModelResponse
from tokentape_bridge.deadline import within_deadline
from tokentape_bridge.errors import ApiError
from tokentape_bridge.settings import ChatSettings
from tokentape_bridge.sidecar import Served, Sidecar
from tokentape_bridge.sidecar_file import SidecarTable
from tokentape_bridge.tape_choice import TAPE_ID, malformed_tape_id

_DRAIN_INTERVAL_SECONDS = 0.1


class SidecarPool:
    """The sidecars of this bridge, by name. Use `open_pool`."""

    def __init__(self, table: SidecarTable, settings: ChatSettings, access: Access, tasks: asyncio.TaskGroup) -> None:
        """Connect to the sidecars of `table`, and in `tasks` follow their health, until `close`."""
        self._access = access
        self._table = table
        self._settings = settings
        self._tasks = tasks
        self._connected: dict[str, Sidecar] = {}
        self._followers: dict[Sidecar, asyncio.Task[None]] = {}
        """One for each sidecar that is connected, those included that have left the table."""
        self._retiring: set[asyncio.Task[None]] = set()
        self._current()

    async def close(self) -> None:
        """Close all connections."""
        for task in (*self._retiring, *self._followers.values()):
            task.cancel()
        await asyncio.gather(*(sidecar.close() for sidecar in self._followers))

    async def choose(self, tape_id: str, model: str | None) -> tuple[Sidecar, Served]:
        """Return the sidecar for a request, and what it serves.

        `tape_id` is empty for a request without a tape, `model` is None where it names none. Raises `ApiError`: a tape
        id is malformed or names no sidecar of ours (400), nobody serves the model (404), the sidecar does not serve
        (503). Raises `AioRpcError` when it does not answer.
        """
        sidecar = self._owner(tape_id) if tape_id else self._least_busy(model)
        # Occupied from here on, so that it is not closed meanwhile.
        async with within_deadline():
            with sidecar.occupied():
                served = await sidecar.served()
        if not served.has(model):
            raise ApiError(
                f"model: {str(model)[:100]!a} does not exist here; served: {self._model_names(served)}",
                param="model",
                code="model_not_found",
                status=404,
            )
        return sidecar, served

    async def health(self) -> dict[str, str | None]:
        """Return for each sidecar's name None when it serves, else why not."""
        sidecars = list(self._current().values())
        problems = await asyncio.gather(*(sidecar.health() for sidecar in sidecars))
        return dict(zip((sidecar.name for sidecar in sidecars), problems, strict=True))

    async def models(self) -> list[GetModelResponse]:
        """Return what each sidecar serves now. Raises as `choose` does when no sidecar serves."""
        _, served = await self.choose("", None)
        return [served.model, *(known.model for known in self._known() if known is not served)]

    def _owner(self, tape_id: str) -> Sidecar:
        parsed = TAPE_ID.fullmatch(tape_id)
        if parsed is None:
            raise malformed_tape_id()
        sidecar = self._current().get(parsed["sidecar"])
        if sidecar is None:
            raise ApiError(
                f"metadata.tape_id: this bridge has no sidecar named {parsed['sidecar'][:80]!a}",
                param="metadata.tape_id",
                code="unknown_sidecar",
            )
        return sidecar

    def _least_busy(self, model: str | None) -> Sidecar:
        """Prefer a sidecar known to serve `model`, then one that serves anything, then any (which may yet answer)."""

        def rank(sidecar: Sidecar) -> tuple[bool, bool, bool, int]:
            served = sidecar.served_now
            is_other = served is None or not served.has(model)
            return not sidecar.serves, served is None, is_other, sidecar.in_flight

        sidecars = self._current().values()
        if not sidecars:
            raise ApiError(
                "this bridge has no sidecar now",
                code="sidecar_unavailable",
                status=503,
                error_type="service_unavailable",
            )
        return min(sidecars, key=rank)

    def _current(self) -> Mapping[str, Sidecar]:
        """Return the sidecars of the table as it is now, connected."""
        table = self._table.current()
        for name, sidecar in list(self._connected.items()):
            if table.get(name) != sidecar.address:
                del self._connected[name]
                self._retiring.add(retiring := self._tasks.create_task(self._retire(sidecar), name=f"retire {name}"))
                retiring.add_done_callback(self._retiring.discard)
        for name in table.keys() - self._connected.keys():
            sidecar = self._connected[name] = Sidecar(name, table[name], self._settings, self._access)
            self._followers[sidecar] = self._tasks.create_task(sidecar.run(), name=f"follow {name}")
        return self._connected

    async def _retire(self, sidecar: Sidecar) -> None:
        """Close the connection to a sidecar that has left the table, when its requests have ended."""
        while sidecar.in_flight:  # noqa: ASYNC110 - requests end in many ways, and nobody hurries
            await asyncio.sleep(_DRAIN_INTERVAL_SECONDS)
        self._followers.pop(sidecar).cancel()
        await sidecar.close()

    def _known(self) -> list[Served]:
        return [it.served_now for it in self._connected.values() if it.serves and it.served_now is not None]

    def _model_names(self, served: Served) -> str:
        return ", ".join(sorted({name for each in (served, *self._known()) for name in each.names}))


@contextlib.asynccontextmanager
async def open_pool(table: SidecarTable, settings: ChatSettings, access: Access = OPEN) -> AsyncGenerator[SidecarPool]:
    """Connect to the sidecars of `table`, follow their health and the table's changes, and close them in the end.

    `access` gets into all of them.

    None of them needs to be there yet.
    """
    async with asyncio.TaskGroup() as tasks:
        pool = SidecarPool(table, settings, access, tasks)
        try:
            yield pool
        finally:
            await pool.close()
