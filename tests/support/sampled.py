"""Choices that an engine sampled, as the events of a call."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from support.tokenizers import KINDS
from tokentape.choice_columns import TokenRun, Top
from tokentape.v1 import types_pb2
from tokentape.v1.generation_pb2 import GenerateResponse
from tokentape.v1.types_pb2 import Completion, TopLogprobs
from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.completion import CallEvent

PEPPER = "\N{HOT PEPPER}"
CALL = '<tool_call>\n{"name": "ls", "arguments": {"p": "a"}}\n</tool_call>'
BRACES = json.dumps({"c": "mkdir -p test/{a,b", "t": f"</tool_call>{PEPPER}\u2028\u0085"}, ensure_ascii=False)
SHELL = f'<tool_call>\n{{"name": "sh", "arguments": {BRACES}}}\n</tool_call>'
TWO_CALLS = f"<think>\nHm {PEPPER},\n\n\u65e5\u672c x\u0301.\n</think>\n\nI look {PEPPER}:\n{CALL}\n{SHELL}"
STARTED = GenerateResponse(started=GenerateResponse.Started(call_id="c", prompt_token_count=3))
PROMPT = [1, 2, 3]
K = 2


@dataclass(frozen=True, slots=True)
class Sampled:
    """A choice that the engine sampled."""

    token_ids: list[int]
    completion: dict[str, Any]

    def events(self, pieces: Sequence[Sequence[int]], index: int = 0) -> list[GenerateResponse]:
        """Its events, with the tokens of each piece at once; log-probabilities tell the positions."""
        events: list[GenerateResponse] = []
        position = 0
        for piece in pieces:
            places = range(position, position := position + len(piece))
            top = TopLogprobs(
                k=K,
                token_ids=[token_id for place in places for token_id in (place, place + 1)],
                logprobs=[-value for place in places for value in (place, place + 1)],
            )
            delta = GenerateResponse.Delta(
                choice=index, token_ids=piece, logprobs=[-place / 8 for place in places], top_logprobs=top
            )
            events.append(GenerateResponse(delta=delta))
        finished = Completion(choice=index, token_count=len(self.token_ids), **self.completion)
        return [*events, GenerateResponse(finished=finished)]


async def stream_of(events: Sequence[GenerateResponse]) -> AsyncGenerator[CallEvent]:
    """The events as the bridge's client of a sidecar gives them."""
    for event in events:
        yield call_event(event)


def call_event(event: GenerateResponse) -> CallEvent:
    """An event of `Generate`, as the bridge's client of a sidecar gives it."""
    if event.HasField("delta"):
        delta = event.delta
        tops = delta.top_logprobs
        top = Top(tops.k, tops.token_ids, tops.logprobs) if tops.k else None
        return TokenRun(delta.choice, delta.token_ids, delta.logprobs, delta.weight_version, top)
    return event.finished if event.HasField("finished") else event.started


def sampled(chat: ChatModel, text: str, *, stops: bool = True, kind: str = "smollm2", **stop: Any) -> Sampled:
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    if stops and not stop:
        ids.append(KINDS[kind].stop_token_ids[0])
    reason = types_pb2.FINISH_REASON_STOP if stops else types_pb2.FINISH_REASON_LENGTH
    return Sampled(ids, {"finish_reason": reason, **stop})
