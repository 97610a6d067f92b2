"""OpenAI's JSON for plain completions. The text is decoded from the ids, as in a chat, and nothing is read into it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tokentape.v1.generation_pb2 import GenerateResponse
from tokentape_bridge.completion import Call, Choice
from tokentape_bridge.responses import Json, SampledTokens, finish_reason, stop_reason, usage
from tokentape_bridge.sampling_fields import SamplingFields
from tokentape_bridge.text_logprobs import Columns, ColumnWriter, prompt_logprobs, prompt_tops
from tokentape_bridge.text_schemas import CompletionRequest
from tokentape_bridge.text_stream import TextOptions, completion_text
from tokentape_bridge.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """One prompt of a request."""

    token_ids: list[int]
    text: str
    """As the client gave it, or decoded from the ids that it gave."""
    hidden: int = 0
    """How many characters of the ids' text precede it: special tokens that the tokenizer added."""


class ChoiceWriter:
    """Writes one choice, whole or piece by piece. CPU work."""

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, prompt: TextPrompt) -> None:
        """`prompt` is the one that the choice completes."""
        self._request = request
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._columns = self._writer(len(prompt.text) if request.echo else 0)

    def opening(self, started: GenerateResponse.Started) -> Json:
        """Return what precedes all tokens, as far as it is asked for: the prompt's text, ids and log-probabilities."""
        opening: Json = {"text": "", "logprobs": None}
        if self._request.echo:
            opening = {"text": self._prompt.text, "logprobs": self._echoed(started)}
        if self._request.wants_token_ids:
            opening["prompt_token_ids"] = self._prompt.token_ids
        if self._request.prompt_logprobs is not None:
            count = self._request.prompt_logprobs
            opening["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._prompt.token_ids, started, count)
        return opening

    def tokens(self, tokens: SampledTokens) -> Json:
        """Return what the next tokens add, but for their text."""
        added: Json = {"logprobs": None}
        if self._request.logprobs is not None:
            added["logprobs"] = self._columns.write(tokens.token_ids, tokens.logprobs, tokens.top_logprobs)
        if self._request.wants_token_ids:
            added["token_ids"] = list(tokens.token_ids)
        return added

    def _echoed(self, started: GenerateResponse.Started) -> Columns | None:
        if self._request.logprobs is None:
            return None
        writer = self._writer(-self._prompt.hidden, skip_special_tokens=False)
        return writer.write(self._prompt.token_ids, [None, *started.prompt_logprobs], [[], *prompt_tops(started)])

    def _writer(self, offset: int, *, skip_special_tokens: bool | None = None) -> ColumnWriter:
        skip = self._request.skip_special_tokens is not False if skip_special_tokens is None else skip_special_tokens
        return ColumnWriter(
            self._tokenizer,
            as_ids=bool(self._request.return_tokens_as_token_ids),
            skip_special_tokens=skip,
            top=self._request.logprobs or 0,
            offset=offset,
        )


def text_completion(
    request: CompletionRequest,
    prompts: Sequence[TextPrompt],
    calls: Sequence[Call],
    *,
    head: Json,
    tape_id: str,
    tokenizer: Tokenizer,
) -> Json:
    """Return the body of an unstreamed completion: the first prompt's choices, then the second's, and so on.

    `calls` has one for each prompt, `head` is what `text_head` made. CPU work, of the size of the completions.
    """
    choices = [
        _choice(request, choice, call.started, prompt, tokenizer)
        for prompt, call in zip(prompts, calls, strict=True)
        for choice in call.choices
    ]
    sampled = sum(len(choice.token_ids) for call in calls for choice in call.choices)
    return head | {
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": usage(sum(call.prompt_token_count for call in calls), sampled),
        "tokentape": text_extension(tape_id, [call.call_id for call in calls]),
    }


def text_head(model: str, call_id: str) -> Json:
    """Return what a completion, or each chunk of one, begins with; `call_id` is the first call's."""
    return {"id": f"cmpl-{call_id}", "object": "text_completion", "created": int(time.time()), "model": model}


def text_extension(tape_id: str, call_ids: Sequence[str]) -> Json:
    """Say on which tape the calls are; there is one for each prompt."""
    return {"tape_id": tape_id or None, "call_ids": list(call_ids)}


def joined(first: Columns | None, second: Columns | None) -> Columns | None:
    """Return columns one after the other."""
    if first is None or second is None:
        return second if first is None else first
    return {name: [*column, *second[name]] for name, column in first.items()}


def _choice(
    request: CompletionRequest,
    choice: Choice,
    started: GenerateResponse.Started,
    prompt: TextPrompt,
    tokenizer: Tokenizer,
) -> Json:
    finished = choice.finished
    assert finished is not None, "collect returns finished choices only"
    options = text_options(request)
    writer = ChoiceWriter(request, tokenizer, prompt)
    opening, added = writer.opening(started), writer.tokens(choice)
    return {
        **opening,
        **added,
        "text": opening["text"] + completion_text(tokenizer, choice.token_ids, finished, options),
        "logprobs": joined(opening["logprobs"], added["logprobs"]),
        "finish_reason": finish_reason(finished, has_calls=False),
        "stop_reason": stop_reason(finished),
    }


def text_options(request: SamplingFields) -> TextOptions:
    """Return what of a request shapes the text of its completions; of stop tokens, those that it adds."""
    return TextOptions(
        skip_special_tokens=request.skip_special_tokens is not False,
        stop=request.stop or (),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        min_tokens=request.min_tokens or 0,
    )
