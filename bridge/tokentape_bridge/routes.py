"""The HTTP routes: they read the request, call `chat`, and write the answer."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import JSONResponse

from tokentape_bridge import chat
from tokentape_bridge.disconnect import unless_disconnected
from tokentape_bridge.errors import ApiError
from tokentape_bridge.responses import Json
from tokentape_bridge.schemas import ChatCompletionRequest, TokenizeRequest, log_ignored_fields
from tokentape_bridge.sidecar_pool import SidecarPool

router = APIRouter()
"""All routes of the bridge."""

_STARTED_AT = int(time.time())


async def _pool(request: Request) -> SidecarPool:
    return cast("SidecarPool", request.state.pool)


async def _require_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError("the content type must be application/json", status=415, code="unsupported_media_type")


_Pool = Annotated[SidecarPool, Depends(_pool)]
_json_body = [Depends(_require_json)]


@router.get("/health")
async def health(pool: _Pool) -> Json:
    """Answer 200 while at least one sidecar serves, else 503; both name every sidecar."""
    problems = await pool.health()
    if all(problem is not None for problem in problems.values()):
        states = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise ApiError(
            f"no sidecar serves ({states})", status=503, error_type="service_unavailable", code="sidecar_unavailable"
        )
    return {"status": "ok", "sidecars": {name: problem or "SERVING" for name, problem in problems.items()}}


@router.get("/version")
async def get_version() -> Json:
    """Answer tokentape's version, without asking a sidecar."""
    return {"version": version("tokentape")}


@router.get("/v1/models")
async def list_models(pool: _Pool) -> Json:
    """Answer the models that requests may name, each with the most tokens of prompt and completion together."""
    data = [
        {
            "id": model.name,
            "object": "model",
            "created": _STARTED_AT,
            "owned_by": "tokentape",
            "max_model_len": model.max_context_tokens,
        }
        for model in await pool.models()
    ]
    return {"object": "list", "data": data}


@router.post("/tokenize", dependencies=_json_body)
async def tokenize(body: TokenizeRequest, pool: _Pool) -> Json:
    """Answer the prompt's token ids: those that a chat with the same fields has."""
    log_ignored_fields(body)
    return await chat.tokenize(pool, body)


@router.post("/v1/chat/completions", dependencies=_json_body)
async def create_chat_completion(
    body: ChatCompletionRequest,
    request: Request,
    pool: _Pool,
    x_tape_id: Annotated[str | None, Header()] = None,
) -> JSONResponse:
    """Answer one chat completion. A client that leaves aborts it."""
    log_ignored_fields(body)
    tape_id = chat.requested_tape_id(body, x_tape_id)
    answer = await unless_disconnected(request, chat.complete_chat(pool, body, tape_id))
    # Writing the JSON of a long completion takes tens of milliseconds.
    return await asyncio.to_thread(JSONResponse, answer, headers=_headers(answer))


def _headers(answer: Json) -> dict[str, str]:
    """Return the answer's extension object as headers, each as far as it has a value."""
    extension: dict[str, str | bool | None] = answer["tokentape"]
    return {
        f"x-{key.replace('_', '-')}": value if isinstance(value, str) else str(value).lower()
        for key, value in extension.items()
        if value is not None
    }
