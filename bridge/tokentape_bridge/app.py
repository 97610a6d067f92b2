"""The ASGI app: routes, errors, and the connections to the sidecars for as long as it runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from fastapi import FastAPI

from tokentape_bridge.errors import install_error_handlers
from tokentape_bridge.routes import router
from tokentape_bridge.settings import Settings
from tokentape_bridge.sidecar_pool import SidecarPool, open_pool


def create_app(settings: Settings) -> FastAPI:
    """Return the app. It starts, and answers, whether or not the sidecars are there."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[dict[str, SidecarPool]]:
        async with open_pool(settings.sidecars, settings.chat) as pool:
            yield {"pool": pool}

    app = FastAPI(title="tokentape bridge", lifespan=lifespan, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    app.include_router(router)
    return app
