"""Which sidecar serves a request: the one that its tape id names, else the least busy one that has its model."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Mapping, Sequence

from tokentape.v1.generation_pb2 import GetModelResponse
from tokentape_bridge.errors import ApiError
from tokentape_bridge.settings import ChatSettings
from tokentape_bridge.sidecar import Served, Sidecar

_TAPE_ID = re.compile(r"(?P<sidecar>[A-Za-z0-9][A-Za-z0-9_-]{0,63})\.[0-9a-f]{32}")


class SidecarPool:
    """The sidecars of this bridge, by name."""

    def __init__(self, sidecars: Sequence[Sidecar]) -> None:
        """At least one; their names differ."""
        self._sidecars = {sidecar.name: sidecar for sidecar in sidecars}

    async def choose(self, tape_id: str, model: str | None) -> tuple[Sidecar, Served]:
        """Return the sidecar for a request, and what it serves.

        `tape_id` is empty for a request without a tape, `model` is None where it names none. Raises `ApiError`: a tape
        id is malformed or names no sidecar of ours (400), nobody serves the model (404), the sidecar does not serve
        (503). Raises `AioRpcError` when it does not answer.
        """
        sidecar = self._owner(tape_id) if tape_id else self._least_busy(model)
        served = await sidecar.served()
        if model is not None and model != served.model.name:
            raise ApiError(
                f"model: {model[:100]!a} does not exist here; served: {self._model_names(served)}",
                param="model",
                code="model_not_found",
                status=404,
            )
        return sidecar, served

    async def health(self) -> dict[str, str | None]:
        """Return for each sidecar's name None when it serves, else why not."""
        problems = await asyncio.gather(*(sidecar.health() for sidecar in self._sidecars.values()))
        return dict(zip(self._sidecars, problems, strict=True))

    async def models(self) -> list[GetModelResponse]:
        """Return the models served now, one of each name. Raises as `choose` does when no sidecar serves."""
        _, served = await self.choose("", None)
        models = [served.model, *(known.model for known in self._known())]
        return list({model.name: model for model in models}.values())

    def _owner(self, tape_id: str) -> Sidecar:
        parsed = _TAPE_ID.fullmatch(tape_id)
        if parsed is None:
            raise ApiError(
                "metadata.tape_id: is not of the form <sidecar name>.<32 hex digits>",
                param="metadata.tape_id",
                code="invalid_value",
            )
        sidecar = self._sidecars.get(parsed["sidecar"])
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
            is_other = served is None or model not in (None, served.model.name)
            return not sidecar.serves, served is None, is_other, sidecar.in_flight

        return min(self._sidecars.values(), key=rank)

    def _known(self) -> list[Served]:
        return [it.served_now for it in self._sidecars.values() if it.serves and it.served_now is not None]

    def _model_names(self, served: Served) -> str:
        return ", ".join(sorted({served.model.name, *(known.model.name for known in self._known())}))


@contextlib.asynccontextmanager
async def open_pool(addresses: Mapping[str, str], settings: ChatSettings) -> AsyncGenerator[SidecarPool]:
    """Connect to the sidecars at `addresses` (name → address), follow their health, and close them in the end.

    None of them needs to be there yet.
    """
    async with contextlib.AsyncExitStack() as stack:
        sidecars = [Sidecar(name, address, settings) for name, address in addresses.items()]
        for sidecar in sidecars:
            stack.push_async_callback(sidecar.close)
        followers = await stack.enter_async_context(asyncio.TaskGroup())
        tasks = [followers.create_task(sidecar.run(), name=f"follow {sidecar.name}") for sidecar in sidecars]
        try:
            yield SidecarPool(sidecars)
        finally:
            for task in tasks:
                task.cancel()
