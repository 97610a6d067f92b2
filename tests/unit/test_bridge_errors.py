from __future__ import annotations

import json

import grpc
import grpc.aio
import httpx
import pytest
from fastapi import FastAPI

from tokentape_bridge.errors import ApiError, from_rpc, install_error_handlers

Status = grpc.StatusCode


def rpc_error(status: Status, details: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("status", "http_status", "error_type", "code"),
    [
        (Status.INVALID_ARGUMENT, 400, "invalid_request_error", "invalid_value"),
        (Status.OUT_OF_RANGE, 400, "invalid_request_error", "context_length_exceeded"),
        (Status.NOT_FOUND, 404, "invalid_request_error", "not_found"),
        (Status.FAILED_PRECONDITION, 400, "invalid_request_error", "tape_sealed"),
        (Status.RESOURCE_EXHAUSTED, 400, "invalid_request_error", "limit_reached"),
        (Status.ABORTED, 400, "invalid_request_error", "stale_weights"),
        (Status.UNAVAILABLE, 503, "service_unavailable", "sidecar_unavailable"),
        (Status.DEADLINE_EXCEEDED, 504, "timeout", "sidecar_timeout"),
        (Status.INTERNAL, 500, "server_error", "engine_error"),
        (Status.UNKNOWN, 500, "server_error", "internal_error"),
        (Status.UNIMPLEMENTED, 500, "server_error", "internal_error"),
        (Status.PERMISSION_DENIED, 500, "server_error", "internal_error"),
    ],
)
def test_each_status_has_its_form(status: Status, http_status: int, error_type: str, code: str) -> None:
    error = from_rpc(rpc_error(status, "words"))
    assert (error.status, error.error_type, error.code) == (http_status, error_type, code)
    assert ("words" in error.message) == (code != "internal_error")


@pytest.mark.parametrize(
    ("details", "param", "message"),
    [
        ("sampling.temperature: must be at least 0", "temperature", "temperature: must be at least 0"),
        ("sampling.stop_token_ids[3]: too large", "stop_token_ids", "stop_token_ids: too large"),
        ("sampling.structured_output.json_schema: bad", "response_format", "response_format: bad"),
        ("prompt_token_ids: too many", "messages", "messages: too many"),
        ("tape_id: malformed", "metadata.tape_id", "metadata.tape_id: malformed"),
        ("no field at all", None, "no field at all"),
        ("Two words: no field", None, "Two words: no field"),
    ],
)
def test_the_sidecars_field_becomes_openais(details: str, param: str | None, message: str) -> None:
    error = from_rpc(rpc_error(Status.INVALID_ARGUMENT, details))
    assert (error.param, error.message) == (param, message)


async def answer_to(error: Exception) -> httpx.Response:
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/")
    async def fail() -> None:  # pyright: ignore[reportUnusedFunction] # the app calls it
        raise error

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://bridge") as client:
        return await client.get("/")


@pytest.mark.parametrize(
    "error",
    [
        rpc_error(Status.INVALID_ARGUMENT, "sampling.min_tokens: above max_tokens and the context length"),
        rpc_error(Status.RESOURCE_EXHAUSTED, "the tape's max_tokens of context length is used up"),
        ApiError("no 'max_tokens' in this template"),
        ApiError("logit_bias.max_tokens: must be a number", param="logit_bias.max_tokens"),
    ],
)
async def test_only_an_overflow_reads_like_one(error: Exception) -> None:
    response = await answer_to(error)
    assert response.status_code == 400
    assert "context length" not in response.text
    assert "max_tokens" not in response.text


async def test_an_overflow_keeps_its_words_and_numbers() -> None:
    details = "prompt_token_ids: the maximum context length is 16 tokens, but the prompt has 20"
    response = await answer_to(rpc_error(Status.OUT_OF_RANGE, details))
    assert response.json()["error"] == {
        "message": "the maximum context length is 16 tokens, but the prompt has 20",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


async def test_the_unexpected_is_generic() -> None:
    response = await answer_to(RuntimeError("secret"))
    assert response.status_code == 500
    assert json.loads(response.text)["error"]["code"] == "internal_error"
    assert "secret" not in response.text
