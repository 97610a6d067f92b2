"""The HTTP routes: they read the request, call what serves it, and write the answer.

Every route is there twice: as it is, and under `/tapes/{tape_id}`, for clients that know nothing of tapes. There it
serves that tape: its sidecar, and, for what is recorded, the tape itself.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterator
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from tokentape.v1.generation_pb2 import GetModelResponse
from tokentape_bridge import chat, completions, tokens
from tokentape_bridge.chat_stream import ChatStream
from tokentape_bridge.dependencies import JSON_BODY, OR_STREAMED, Pool, TapeOfHeader, TapeOfPath, headers_of
from tokentape_bridge.disconnect import unless_disconnected
from tokentape_bridge.errors import ApiError
from tokentape_bridge.fields import log_ignored_fields
from tokentape_bridge.frame_stream import FrameStream
from tokentape_bridge.json_bodies import JsonResponse, JsonRoute
from tokentape_bridge.responses import Json
from tokentape_bridge.schemas import ChatCompletionRequest, TokenizeRequest, log_ignored
from tokentape_bridge.sse import EventStreamResponse
from tokentape_bridge.tape_choice import requested_tape_id
from tokentape_bridge.text_completion_stream import TextCompletionStream
from tokentape_bridge.text_schemas import CompletionRequest, DetokenizeRequest

router = APIRouter(route_class=JsonRoute)
"""All routes of the bridge."""

TAPE_PREFIX = "/tapes/{tape_id}"
"""Before any of them: the tape that the request is for."""

_STARTED_AT = int(time.time())


async def declare_tape_of_path(tape_id: Annotated[str, Path(description="the tape that the request is for")]) -> None:
    """Put the path's tape into OpenAPI, for the routes that have one."""


@router.get("/health")
async def health(pool: Pool) -> Json:
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
async def list_models(pool: Pool, tape_id: TapeOfPath) -> Json:
    """Answer the models that requests may name, each with the most tokens of prompt and completion together.

    LoRA adapters are among them, `parent` being the name of their model.
    """
    models = [(await pool.choose(tape_id, None))[1].model] if tape_id else await pool.models()
    cards = {card["id"]: card for model in models for card in _model_cards(model)}
    return {"object": "list", "data": list(cards.values())}


def _model_cards(model: GetModelResponse) -> Iterator[Json]:
    for name in (model.name, *model.lora_names):
        yield {
            "id": name,
            "object": "model",
            "created": _STARTED_AT,
            "owned_by": "tokentape",
            "parent": None if name == model.name else model.name,
            "max_model_len": model.max_context_tokens,
        }


@router.post("/tokenize", dependencies=JSON_BODY)
async def tokenize(
    body: TokenizeRequest, pool: Pool, tape_of_path: TapeOfPath, tape_of_header: TapeOfHeader = None
) -> Json:
    """Answer the prompt's token ids: those that a chat with the same fields has on the same tape."""
    log_ignored(body)
    return await tokens.tokenize(pool, body, requested_tape_id(body, tape_of_header, tape_of_path))


@router.post("/detokenize", dependencies=JSON_BODY)
async def detokenize(
    body: DetokenizeRequest, pool: Pool, tape_of_path: TapeOfPath, tape_of_header: TapeOfHeader = None
) -> Json:
    """Answer the text of token ids, special tokens included."""
    log_ignored_fields(body)
    return await tokens.detokenize(pool, body, requested_tape_id(body, tape_of_header, tape_of_path))


@router.post("/v1/chat/completions", dependencies=JSON_BODY, responses=OR_STREAMED)
async def create_chat_completion(
    body: ChatCompletionRequest,
    request: Request,
    pool: Pool,
    tape_of_path: TapeOfPath,
    tape_of_header: TapeOfHeader = None,
) -> Response:
    """Answer one chat completion. A client that leaves aborts it."""
    log_ignored(body)
    tape_id = requested_tape_id(body, tape_of_header, tape_of_path)
    if body.stream:
        return await _streamed(request, ChatStream(pool, body, tape_id))
    return await _whole(request, chat.complete_chat(pool, body, tape_id))


@router.post("/v1/completions", dependencies=JSON_BODY, responses=OR_STREAMED)
async def create_completion(
    body: CompletionRequest,
    request: Request,
    pool: Pool,
    tape_of_path: TapeOfPath,
    tape_of_header: TapeOfHeader = None,
) -> Response:
    """Answer the completions of one prompt or several. A client that leaves aborts them."""
    log_ignored_fields(body)
    tape_id = requested_tape_id(body, tape_of_header, tape_of_path)
    if body.stream:
        return await _streamed(request, TextCompletionStream(pool, body, tape_id))
    return await _whole(request, completions.complete_text(pool, body, tape_id))


async def _streamed(request: Request, stream: FrameStream[Any]) -> Response:
    frames = await unless_disconnected(request, stream.begin())
    return EventStreamResponse(frames, headers=headers_of(stream.extension))


async def _whole(request: Request, answering: Coroutine[Any, Any, Json]) -> Response:
    answer = await unless_disconnected(request, answering)
    return JsonResponse(answer, headers=headers_of(answer["tokentape"]))
