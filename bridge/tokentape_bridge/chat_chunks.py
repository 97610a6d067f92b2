"""OpenAI's `chat.completion.chunk` objects for the deltas of one call.

Of each choice: first a chunk with its role, then those with what was added, and last one with its `finish_reason`,
which may add the rest. A token's id and log-probability are in the chunk of the event that brought them, whether or not
its text is certain by then, so that some chunks have an empty `delta`. A tool call is whole in one chunk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tokentape_bridge.choice_stream import ChoiceDelta
from tokentape_bridge.responses import Json, finish_reason, logprob_entries, stop_reason, tool_call, usage
from tokentape_bridge.schemas import ChatCompletionRequest
from tokentape_bridge.tokenizer import Tokenizer


class ChatChunks:
    """Makes the chunks of one call."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        *,
        call_id: str,
        model: str,
        prompt_token_count: int,
        tokenizer: Tokenizer,
    ) -> None:
        """`model` is the name that the answer gives."""
        self._request = request
        self._call_id = call_id
        self._tokenizer = tokenizer
        self._prompt_token_count = prompt_token_count
        self._completion_token_count = 0
        self._choices = [_ChoiceState() for _ in range(request.n or 1)]
        self._common: Json = {
            "id": f"chatcmpl-{call_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        if self._request.wants_usage:
            # OpenAI's chunks have it from the first on, null until the last.
            self._common["usage"] = None

    def opening(self, extension: Json, prompt_token_ids: Sequence[int] | None) -> list[Json]:
        """Return the chunks with the choices' roles; the first has what concerns the whole call.

        `prompt_token_ids`: the prompt's, where the request wants ids.
        """
        chunks = [self._chunk({"index": index, "delta": {"role": "assistant"}}) for index in range(len(self._choices))]
        chunks[0]["tokentape"] = extension
        if self._request.wants_token_ids:
            chunks[0]["prompt_token_ids"] = prompt_token_ids
        return chunks

    def chunk(self, added: ChoiceDelta) -> Json | None:
        """Return the chunk for what was added to a choice; `None` where the client would read nothing of it."""
        state = self._choices[added.index]
        self._completion_token_count += len(added.token_ids)
        choice: Json = {"index": added.index, "delta": self._delta(added, state)}
        if added.finished is not None:
            choice["finish_reason"] = finish_reason(added.finished, has_calls=state.call_count > 0)
            choice["stop_reason"] = stop_reason(added.finished)
        elif not choice["delta"] and not self._request.logprobs and not self._request.wants_token_ids:
            return None
        if self._request.logprobs:
            choice["logprobs"] = {"content": logprob_entries(self._request, added, self._tokenizer)}
        if self._request.wants_token_ids:
            choice["token_ids"] = added.token_ids
        return self._chunk(choice)

    def closing(self) -> Json | None:
        """Return the chunk with the usage, where the request wants one."""
        if not self._request.wants_usage:
            return None
        return {**self._common, "choices": [], "usage": usage(self._prompt_token_count, self._completion_token_count)}

    def _delta(self, added: ChoiceDelta, state: _ChoiceState) -> Json:
        delta: Json = {}
        reasoning, content, calls = added.reasoning, added.content, added.tool_calls
        if reasoning is not None:
            delta["reasoning_content"] = reasoning
        if calls and self._request.parallel_tool_calls is False:
            calls = calls[: 1 - state.call_count]
        if calls:
            name = f"{self._call_id}-{added.index}"
            numbered = enumerate(calls, state.call_count)
            delta["tool_calls"] = [{"index": number, **tool_call(name, number, call)} for number, call in numbered]
            state.call_count += len(calls)
        # An answer that says nothing has empty content, one that only calls has none.
        says_nothing = added.finished is not None and not state.has_content and not state.call_count
        if content or says_nothing:
            delta["content"] = content
            state.has_content = True
        return delta

    def _chunk(self, choice: Json) -> Json:
        return {**self._common, "choices": [{"logprobs": None, "finish_reason": None, **choice}]}


class _ChoiceState:
    """What was sent of a choice."""

    def __init__(self) -> None:
        self.call_count = 0
        self.has_content = False
