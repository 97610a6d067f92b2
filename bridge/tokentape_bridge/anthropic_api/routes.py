"""The HTTP routes of the Messages API; what holds for all routes is said in `tokentape_bridge.routes`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tokentape_bridge.anthropic_api import serving
from tokentape_bridge.anthropic_api.errors import error_frame
from tokentape_bridge.anthropic_api.schemas import CountTokensRequest, MessageRequest
from tokentape_bridge.dependencies import JSON_BODY, OR_STREAMED, Pool, TapeOfHeader, TapeOfPath, headers_of
from tokentape_bridge.disconnect import unless_disconnected
from tokentape_bridge.json_bodies import JsonResponse, JsonRoute
from tokentape_bridge.responses import Json
from tokentape_bridge.sse import EventStreamResponse

message_router = APIRouter(route_class=JsonRoute)
"""All routes of the Messages API."""


@message_router.post("/v1/messages", dependencies=JSON_BODY, responses=OR_STREAMED)
async def create_message(
    body: MessageRequest, request: Request, pool: Pool, tape_of_path: TapeOfPath, tape_of_header: TapeOfHeader = None
) -> Response:
    """Answer one message. A client that leaves aborts it."""
    call = await serving.read_call(pool, body, tape_of_header, tape_of_path)
    if body.stream:
        frames = await unless_disconnected(request, call.begin())
        return EventStreamResponse(
            frames,
            headers=headers_of(call.extension),
            keep_alive=serving.PING_FRAME,
            to_error_frame=error_frame,
        )
    answer = await unless_disconnected(request, call.complete())
    return JsonResponse(answer, headers=headers_of(answer["tokentape"]))


@message_router.post("/v1/messages/count_tokens", dependencies=JSON_BODY)
async def count_tokens(
    body: CountTokensRequest, pool: Pool, tape_of_path: TapeOfPath, tape_of_header: TapeOfHeader = None
) -> Json:
    """Answer how many tokens the prompt of such a message has."""
    return await serving.count_tokens(pool, body, tape_of_header, tape_of_path)
