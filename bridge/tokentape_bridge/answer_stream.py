"""Reading a completion's ids as they come: what they say, in parts, each given once it is certain.

The parts of one completion join to what `ChatModel.parse` says of all its ids, however they were cut. All methods are
CPU work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tokentape.v1 import types_pb2
from tokentape_bridge.answer_parser import AnswerParser, Content, Part, Reasoning
from tokentape_bridge.answers import Answer
from tokentape_bridge.text_stream import TextStream


class AnswerStream(Protocol):
    """One completion's parts."""

    def push(self, token_ids: Sequence[int]) -> list[Part]:
        """Add ids; return the parts that became certain, in order."""
        ...

    def finish(self, completion: types_pb2.Completion) -> list[Part]:
        """End the completion, as `completion` says; return its last parts. Raises `TextStreamError`."""
        ...


class PlainText:
    """All text is content."""

    def __init__(self, text: TextStream) -> None:
        """`text` is the completion's."""
        self._text = text

    def push(self, token_ids: Sequence[int]) -> list[Part]:
        """Add ids."""
        return _content(self._text.push(token_ids))

    def finish(self, completion: types_pb2.Completion) -> list[Part]:
        """End the completion."""
        return _content(self._text.finish(completion))


class ParsedText:
    """The text is read by an `AnswerParser`."""

    def __init__(self, text: TextStream, parser: AnswerParser) -> None:
        """`text` is the completion's."""
        self._text = text
        self._parser = parser

    def push(self, token_ids: Sequence[int]) -> list[Part]:
        """Add ids."""
        return self._parser.push(self._text.push(token_ids))

    def finish(self, completion: types_pb2.Completion) -> list[Part]:
        """End the completion."""
        return [*self._parser.push(self._text.finish(completion)), *self._parser.finish()]


class WholeAnswer:
    """The ids are read when all are there: what they say is given in the end."""

    def __init__(self, parse: Callable[[Sequence[int], types_pb2.Completion], Answer]) -> None:
        """`parse` reads all ids of a completion that ended."""
        self._parse = parse
        self._token_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> list[Part]:
        """Add ids."""
        self._token_ids += token_ids
        return []

    def finish(self, completion: types_pb2.Completion) -> list[Part]:
        """End the completion."""
        answer = self._parse(self._token_ids, completion)
        reasoning = [] if answer.reasoning is None else [Reasoning(answer.reasoning)]
        return [*reasoning, *_content(answer.content), *answer.tool_calls]


def _content(text: str) -> list[Part]:
    return [Content(text)] if text else []
