"""A completion's text: without the stop token that ended it, and up to its stop string.

`completion_text` reads a completion as a whole, `TextStream` as it comes. What a stream gives joins to the whole's
text, which it reads in the end; a stream that has given anything else by then is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokentape.v1 import types_pb2
from tokentape_bridge.answer_parser import overlap
from tokentape_bridge.tokenizer import Tokenizer


class TextStreamError(Exception):
    """A completion's text is not what its beginning was decoded to."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What of a request shapes the text of its completions."""

    skip_special_tokens: bool = True
    """Whether special tokens are left out."""
    stop: Sequence[str] = ()
    """The strings that may end a completion."""
    stop_token_ids: frozenset[int] = frozenset()
    """The ids that may end one, the model's own terminators included."""
    min_tokens: int = 0
    """Within so many first tokens a stop string does not count; one that ends later does."""


def completion_text(
    tokenizer: Tokenizer, token_ids: Sequence[int], completion: types_pb2.Completion | None, options: TextOptions
) -> str:
    """Return the text of a completion that ended as `completion` says; `None`: it has not."""
    if completion is not None and ended_by_token(completion):
        token_ids = token_ids[:-1]
    skip = options.skip_special_tokens
    text = tokenizer.decode(token_ids, skip_special_tokens=skip)
    if completion is None or not completion.HasField("stop_string"):
        return text
    spared = len(tokenizer.decode(token_ids[: options.min_tokens], skip_special_tokens=skip))
    return before_stop_string(text, completion, spared=spared)


def ended_by_token(completion: types_pb2.Completion) -> bool:
    """Whether a completion's last token is the one that ended it."""
    return completion.finish_reason == types_pb2.FINISH_REASON_STOP and not completion.HasField("stop_string")


def before_stop_string(text: str, completion: types_pb2.Completion | None, *, spared: int = 0) -> str:
    """Return `text` up to the stop string that ended it, which does not lie within the first `spared` characters."""
    if completion is None or not completion.HasField("stop_string"):
        return text
    start = text.find(completion.stop_string, _first_start(completion.stop_string, spared))
    return text if start < 0 else text[:start]


class TextStream:
    """One completion's text as its ids come. CPU work.

    Held back are incomplete characters, a last token that may be the one that ends the completion, and text that may be
    the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        """`options` are the request's."""
        self._tokenizer = tokenizer
        self._options = options
        self._decoder = tokenizer.decoder(skip_special_tokens=options.skip_special_tokens)
        self._token_ids: list[int] = []
        self._decoded = 0
        """How many of them the decoder has."""
        self._given: list[str] = []
        self._held = ""
        """Text that is certain but for a stop string."""
        self._held_at = 0
        """Where that stands in the text, in characters."""
        self._spared: int | None = None
        """How many characters the first `min_tokens` have, once there are more."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; return the text that became certain."""
        self._token_ids += token_ids
        count = len(self._token_ids)
        if count and self._token_ids[-1] in self._options.stop_token_ids:
            count -= 1
        self._held += self._decoder.push(self._token_ids[self._decoded : count])
        self._decoded = count
        return self._give(self._certain() if self._options.stop else len(self._held))

    def finish(self, completion: types_pb2.Completion) -> str:
        """End the completion; return the rest of its text. Raises `TextStreamError`."""
        text = completion_text(self._tokenizer, self._token_ids, completion, self._options)
        given = "".join(self._given)
        if not text.startswith(given):
            # The ids are the engine's and stay right; only their text is in doubt.
            raise TextStreamError(f"{len(given)} characters were sent of a text that begins otherwise")
        return text[len(given) :]

    def _give(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._held_at += count
        if text:
            self._given.append(text)
        return text

    def _certain(self) -> int:
        """Return how much of the held text stands before anything that is, or may become, a stop string."""
        spared = self._spared_length() - self._held_at
        return min(self._certain_before(stop, spared) for stop in self._options.stop)

    def _certain_before(self, stop: str, spared: int) -> int:
        """Return the same for one of them; `spared` counts from where the held text begins."""
        start = self._held.find(stop, _first_start(stop, spared))
        return start if start >= 0 else len(self._held) - overlap(self._held, stop)

    def _spared_length(self) -> int:
        if self._decoded <= self._options.min_tokens:
            return self._held_at + len(self._held)
        if self._spared is None:
            first = self._token_ids[: self._options.min_tokens]
            self._spared = len(self._tokenizer.decode(first, skip_special_tokens=self._options.skip_special_tokens))
        return self._spared


def _first_start(stop: str, spared: int) -> int:
    return max(0, spared - len(stop) + 1)
