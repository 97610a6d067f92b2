"""The ASGI app: routes, errors, the connections to the sidecars for as long as it runs, and what stands before them.

A request passes, from the outside in: its id, its span, its line in the log and the metrics (`request_log`), its time
(`deadline`), the key (`api_key`), the limit on its body (`body_limit`), then FastAPI; around them all, errors of the
Messages API get its shape. All of
these are plain ASGI: they hand on the connection itself, so that whoever works for a client learns when it leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from importlib.metadata import version

from fastapi import Depends, FastAPI
from fastapi.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from tokentape.secret_file import SecretFile
from tokentape_bridge import metrics
from tokentape_bridge.anthropic_api.errors import MESSAGE_ERROR_RESPONSES, MessageErrors
from tokentape_bridge.anthropic_api.routes import message_router
from tokentape_bridge.api_key import ApiKeyGate
from tokentape_bridge.body_limit import BodyLimit
from tokentape_bridge.deadline import Deadlines
from tokentape_bridge.errors import ERROR_RESPONSES, install_error_handlers
from tokentape_bridge.request_log import RequestLog
from tokentape_bridge.routes import TAPE_PREFIX, declare_tape_of_path, router
from tokentape_bridge.settings import Settings
from tokentape_bridge.sidecar_file import SidecarTable
from tokentape_bridge.sidecar_pool import SidecarPool, open_pool


def create_app(settings: Settings, keys: SecretFile | None) -> ASGIApp:
    """Return the app, for those who have one of `keys`; None: for all.

    It starts, and answers, whether or not the sidecars are there.
    """
    app: ASGIApp = BodyLimit(_create_api(settings), settings.http.max_request_bytes)
    if keys is not None:
        app = ApiKeyGate(app, keys)
    app = Deadlines(app, settings.http.request_timeout_seconds)
    return MessageErrors(RequestLog(app))


def _create_api(settings: Settings) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[dict[str, SidecarPool]]:
        table = SidecarTable(settings.sidecars, settings.sidecar_file, settings.access)
        async with open_pool(table, settings.chat, settings.access) as pool:
            yield {"pool": pool}

    api = FastAPI(title="tokentape bridge", version=version("tokentape"), lifespan=lifespan, redoc_url=None)
    install_error_handlers(api)
    api.add_api_route("/metrics", _answer_metrics, name="metrics", response_class=PlainTextResponse)
    for routes, errors in ((router, ERROR_RESPONSES), (message_router, MESSAGE_ERROR_RESPONSES)):
        api.include_router(routes, responses=errors)
        api.include_router(
            routes,
            prefix=TAPE_PREFIX,
            tags=["for one tape"],
            dependencies=[Depends(declare_tape_of_path)],
            responses=errors,
        )
    return api


async def _answer_metrics() -> Response:
    """Answer the metrics of all workers, for Prometheus."""
    return Response(await asyncio.to_thread(metrics.exposition), media_type=metrics.MEDIA_TYPE)
