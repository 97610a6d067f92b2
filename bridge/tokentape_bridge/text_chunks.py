"""OpenAI's `text_completion` chunks for the deltas of one request's calls.

Of each choice: first, where that is asked for, a chunk with what precedes all tokens (the prompt's text, ids and
log-probabilities; the very first chunk is always there), then those with what was added, the last of them with its
`finish_reason`. A token's id and log-probability are in the chunk of the event that brought them, whether or not its
text is certain by then.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokentape.v1.generation_pb2 import GenerateResponse
from tokentape_bridge.choice_stream import ChoiceDelta
from tokentape_bridge.responses import Json, finish_reason, stop_reason, usage
from tokentape_bridge.text_responses import ChoiceWriter, TextPrompt, text_extension, text_head
from tokentape_bridge.text_schemas import CompletionRequest
from tokentape_bridge.tokenizer import Tokenizer


class TextChunks:
    """Makes the chunks. CPU work."""

    def __init__(
        self,
        request: CompletionRequest,
        prompts: Sequence[TextPrompt],
        started: Sequence[GenerateResponse.Started],
        *,
        model: str,
        tape_id: str,
        tokenizer: Tokenizer,
    ) -> None:
        """Each of `prompts` has a call, whose first event is in `started`; `model` is the answer's name for it."""
        self._request = request
        self._started = started
        self._count = request.n or 1
        self._writers = [ChoiceWriter(request, tokenizer, prompt) for prompt in prompts for _ in range(self._count)]
        tells_prompt = request.echo or request.wants_token_ids or request.prompt_logprobs is not None
        self._opening_count = len(self._writers) if tells_prompt else 1
        self.opening_token_count = self._count * sum(len(each.token_ids) for each in prompts) if tells_prompt else 0
        """How many tokens of prompts `opening` tells."""
        self._sampled = 0
        self._head = text_head(model, started[0].call_id)
        self.extension = text_extension(tape_id, [event.call_id for event in started])
        """What the answer says about its calls."""

    def opening(self) -> list[Json]:
        """Return the chunks that precede all tokens, one at least; the first says what concerns the whole request."""
        first, *others = (self._opening(index) for index in range(self._opening_count))
        return [{**first, "tokentape": self.extension}, *others]

    def chunk(self, prompt: int, added: ChoiceDelta) -> Json | None:
        """Return the chunk for what was added to a choice of a prompt; `None` where the client would read nothing."""
        self._sampled += len(added.token_ids)
        index = prompt * self._count + added.index
        choice = {"text": added.content, **self._writers[index].tokens(added)}
        if not added.token_ids:
            choice["logprobs"] = None
        if added.finished is not None:
            choice["finish_reason"] = finish_reason(added.finished, has_calls=False)
            choice["stop_reason"] = stop_reason(added.finished)
        is_empty = not any(choice.values()) and added.finished is None
        return None if is_empty else self._chunk(index, choice)

    def closing(self) -> Json | None:
        """Return the chunk with the usage, where the request wants one."""
        if not self._request.wants_usage:
            return None
        prompt_tokens = sum(event.prompt_token_count for event in self._started)
        return {**self._head, "choices": [], "usage": usage(prompt_tokens, self._sampled)}

    def _opening(self, index: int) -> Json:
        return self._chunk(index, self._writers[index].opening(self._started[index // self._count]))

    def _chunk(self, index: int, choice: Json) -> Json:
        # As in OpenAI's, usage is null until the last chunk.
        usage_so_far: Json = {"usage": None} if self._request.wants_usage else {}
        choice = {"index": index, "logprobs": None, "finish_reason": None, **choice}
        return {**self._head, "choices": [choice], **usage_so_far}
