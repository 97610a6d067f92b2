"""Log-probabilities in the forms of plain completions: OpenAI's columns, and vLLM's list for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokentape.v1.generation_pb2 import GenerateResponse
from tokentape_bridge.completion import by_position
from tokentape_bridge.responses import told_logprob
from tokentape_bridge.tokenizer import Tokenizer

Columns = dict[str, list[Any]]
"""`tokens`, `token_logprobs`, `top_logprobs` and `text_offset`: an entry for each position."""

Top = Sequence[tuple[int, float]]
"""The most probable tokens at a position as (id, log-probability), best first."""


def token_name(tokenizer: Tokenizer, token_id: int, *, as_id: bool) -> str:
    r"""Return how a token is written: its text, `bytes:\xf0` where it is part of a character, or `token_id:N`."""
    if as_id:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ColumnWriter:
    """Writes the columns of one text as its tokens come. CPU work."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, skip_special_tokens: bool, top: int, offset: int) -> None:
        """`top`: how many tokens are told at each position. `offset`: where the text begins, in characters."""
        self._tokenizer = tokenizer
        self._decoder = tokenizer.decoder(skip_special_tokens=skip_special_tokens)
        self._as_ids = as_ids
        self._top = top
        self._offset = offset

    def write(self, token_ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Top]) -> Columns:
        """Return the columns of the next tokens. A token without a log-probability (a prompt's first) has null."""
        rows = zip(token_ids, logprobs, tops, strict=True)
        top = [None if logprob is None else self._most_probable(i, logprob, best) for i, logprob, best in rows]
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if logprob is None else told_logprob(logprob) for logprob in logprobs],
            "top_logprobs": top,
            "text_offset": [self._advance(token_id) for token_id in token_ids],
        }

    def _most_probable(self, token_id: int, logprob: float, best: Top) -> dict[str, float]:
        """Return the best tokens, and the one that is there: one more than asked for, where it is none of them."""
        named: dict[str, float] = {}
        for other, value in (*best[: self._top], (token_id, logprob)):
            # Of two tokens of one text the better one is told.
            named.setdefault(self._name(other), told_logprob(value))
        return named

    def _name(self, token_id: int) -> str:
        return token_name(self._tokenizer, token_id, as_id=self._as_ids)

    def _advance(self, token_id: int) -> int:
        start = self._offset
        self._offset += len(self._decoder.push([token_id]))
        return max(0, start)


def prompt_tops(started: GenerateResponse.Started) -> list[Top]:
    """Return the most probable tokens at each position of a prompt but its first, as far as they were asked for."""
    return [*by_position(started.prompt_top_logprobs, len(started.prompt_logprobs))]


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], started: GenerateResponse.Started, count: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: null for the first token, then an object by token id for each.

    It has the `count` best tokens and the prompt's own. `rank` is null where the prompt's own is none of those told.
    """
    positions = zip(token_ids[1:], started.prompt_logprobs, prompt_tops(started), strict=True)
    entries: list[dict[str, Any] | None] = [None]
    for token_id, logprob, best in positions:
        entry = {
            str(other): _entry(tokenizer, other, value, rank) for rank, (other, value) in enumerate(best[:count], 1)
        }
        entry.setdefault(str(token_id), _entry(tokenizer, token_id, logprob, None))
        entries.append(entry)
    return entries


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {
        "logprob": told_logprob(logprob),
        "rank": rank,
        "decoded_token": token_name(tokenizer, token_id, as_id=False),
    }
