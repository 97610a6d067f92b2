"""Putting a streamed chat completion together again, as a client does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from openai.lib.streaming._deltas import accumulate_delta

Json = dict[str, Any]


def assembled(chunks: Iterable[Json]) -> Json:
    """Return the unstreamed body that the chunks of a call stand for.

    Each choice must begin with its role and end with its `finish_reason`, once; usage comes last, without choices.
    """
    chunks = list(chunks)
    first = chunks[0]
    choices: dict[int, Json] = {}
    usage = None
    for chunk in chunks:
        assert usage is None, "nothing comes after the usage"
        assert {key: chunk[key] for key in ("id", "created", "model")} == {
            key: first[key] for key in ("id", "created", "model")
        }
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk is first or not chunk.keys() & {"tokentape", "prompt_token_ids"}
        if not chunk["choices"]:
            usage = chunk["usage"]
        for choice in chunk["choices"]:
            _add(choices, choice)
    body: Json = {"id": first["id"], "object": "chat.completion", "created": first["created"], "model": first["model"]}
    body["choices"] = [choices[index] for index in range(len(choices))]
    assert all(choice["finish_reason"] for choice in body["choices"])
    body |= {key: first[key] for key in ("tokentape", "prompt_token_ids") if key in first}
    return body if usage is None else body | {"usage": usage}


def _add(choices: dict[int, Json], added: Json) -> None:
    """Add one chunk's choice."""
    is_first = added["index"] not in choices
    assert (added["delta"].get("role") == "assistant") == is_first
    choice = choices.setdefault(added["index"], {"index": added["index"], "message": {}, "logprobs": None})
    assert not choice.get("finish_reason"), "nothing of a choice comes after its end"
    known = choice["message"].get("tool_calls", [])
    for index, call in enumerate(added["delta"].get("tool_calls", ()), len(known)):
        assert call["index"] == index, "id and name come once, in each call's first delta"
        assert call["id"]
        assert call["type"] == "function"
        assert call["function"]["name"]
    # What openai's own streaming helper does with deltas.
    choice["message"] = accumulate_delta(choice["message"], added["delta"])
    if "token_ids" in added:
        choice["token_ids"] = choice.get("token_ids", []) + added["token_ids"]
    if added["logprobs"] is not None:
        entries: list[Json] = choice["logprobs"]["content"] if choice["logprobs"] else []
        choice["logprobs"] = {"content": entries + added["logprobs"]["content"]}
    choice["finish_reason"] = added["finish_reason"]
    if added["finish_reason"]:
        choice["stop_reason"] = added["stop_reason"]


def comparable(body: Json) -> Json:
    """Return an answer's body without what differs between two calls, or has its place elsewhere in a streamed one."""
    body = {key: value for key, value in body.items() if key not in ("id", "created")}
    body["tokentape"] = {key: value for key, value in body["tokentape"].items() if key != "call_id"}
    return body | {"choices": [_comparable_choice(choice) for choice in body["choices"]]}


def _comparable_choice(choice: Json) -> Json:
    left_out = {"prompt_token_ids", "generation_token_ids", "generation_log_probs"}
    message = {key: value for key, value in choice["message"].items() if key not in left_out}
    message.setdefault("content", None)
    if "tool_calls" in message:
        # The call's id is in them, and accumulating leaves the index.
        message["tool_calls"] = [{**call, "id": "", "index": 0} for call in message["tool_calls"]]
    return {**choice, "message": message}
