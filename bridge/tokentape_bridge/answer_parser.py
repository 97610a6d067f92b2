"""Reading reasoning, content and tool calls out of a text that comes in pieces.

The forms are those of the Hermes family, which Qwen3 and many others use: reasoning between `<think>` and `</think>`
(the prompt may have opened it), and each tool call as a JSON object between `<tool_call>` and `</tool_call>`. They are
read as text, so it does not matter whether a tokenizer has tokens of their own for them. Nothing is mended: what is not
well formed stays content, as the model wrote it. Line breaks at the ends of reasoning, after it, and around calls where
there is no other content, are the forms' and belong to none of the parts.

Invariant: however a text is cut into pieces, the parts join to the same answer; a whole text is one piece. So what may
still turn out otherwise is held back: line breaks at an end, what may be the beginning of a tag, and a call until it is
complete, since one that is not well formed is content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from tokentape_bridge.answers import Answer
from tokentape_bridge.tool_calls import CALL_OPEN, CloseSearch, ToolCall, UndecidedError, read_call

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"

_SHORT_CALL = 256
"""How many characters of a call are tried again with each piece, to tell soon that it is none."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning. An empty one says that there is reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the content."""

    text: str


Part: TypeAlias = Reasoning | Content | ToolCall


class AnswerParser:
    """Takes an answer's text piece by piece, and gives its parts as soon as they are certain."""

    def __init__(self, *, with_tools: bool, reasoning_is_open: bool, with_reasoning: bool = True) -> None:
        """`with_tools`: whether tool calls are looked for. `with_reasoning`: whether reasoning is.

        `reasoning_is_open`: whether the prompt ended within `<think>`.
        """
        self._with_tools = with_tools
        self._reasoning_is_open = reasoning_is_open
        self._parts: list[Part] = []
        self._text = ""
        """What came and is no part yet."""
        self._reasoning_breaks = _Breaks()
        self._content_breaks = _Breaks()
        self._has_calls = False
        self._search: CloseSearch | None = None
        self._step: Callable[[bool], bool] = self._read_start if with_reasoning else self._read_content
        """Reads on, told whether the text is complete; false when nothing more can be read of it yet."""

    def push(self, text: str) -> list[Part]:
        """Add the next piece of the text; return the parts that became certain, in order."""
        self._text += text
        return self._read(is_complete=False)

    def finish(self) -> list[Part]:
        """End the text; return its last parts."""
        return self._read(is_complete=True)

    def _read(self, *, is_complete: bool) -> list[Part]:
        while self._step(is_complete):
            pass
        if is_complete and not self._has_calls:
            self._add_content(self._content_breaks.held)
        parts, self._parts = self._parts, []
        return parts

    def _read_start(self, is_complete: bool) -> bool:
        """Decide whether there is reasoning."""
        start = self._text.lstrip()
        if not is_complete and _THINK_OPEN.startswith(start):
            return False
        opened = start.startswith(_THINK_OPEN)
        if opened:
            self._text = start[len(_THINK_OPEN) :]
        if opened or self._reasoning_is_open:
            self._reasoning_breaks.drop_leading()
            self._parts.append(Reasoning(""))
            self._step = self._read_reasoning
        else:
            self._step = self._read_content
        return True

    def _read_reasoning(self, is_complete: bool) -> bool:
        reasoning, closed, rest = self._text.partition(_THINK_CLOSE)
        held = 0 if closed or is_complete else overlap(reasoning, _THINK_CLOSE)
        certain = self._reasoning_breaks.hold(reasoning[: len(reasoning) - held])
        if certain:
            self._parts.append(Reasoning(certain))
        self._text = rest if closed else reasoning[len(reasoning) - held :]
        if closed:
            self._step = self._skip_breaks
        return bool(closed)

    def _skip_breaks(self, _is_complete: bool) -> bool:
        """Leave out the line breaks after reasoning."""
        self._text = self._text.lstrip("\n")
        if self._text:
            self._step = self._read_content
        return bool(self._text)

    def _read_content(self, is_complete: bool) -> bool:
        if not self._with_tools:
            self._add_content(self._text)
            self._text = ""
            return False
        start = self._text.find(CALL_OPEN)
        if start < 0:
            held = 0 if is_complete else overlap(self._text, CALL_OPEN)
            start = len(self._text) - held
            self._add_content(self._content_breaks.hold(self._text[:start]))
            self._text = self._text[start:]
            return False
        self._add_content(self._content_breaks.hold(self._text[:start]))
        self._text = self._text[start:]
        self._search = None
        self._step = self._read_call
        return True

    def _read_call(self, is_complete: bool) -> bool:
        is_long = not is_complete and len(self._text) > _SHORT_CALL
        if is_long and self._search and not self._search.reaches_close(self._text):
            return False
        try:
            found = read_call(self._text, len(CALL_OPEN))
        except UndecidedError:
            self._search = self._search or CloseSearch(len(CALL_OPEN))
            if not is_complete:
                return False
            found = None
        end = found[1] if found else len(CALL_OPEN)
        if found:
            self._parts.append(found[0])
            self._has_calls = True
            self._content_breaks.drop_leading()
        else:
            self._add_content(self._content_breaks.hold(CALL_OPEN))
        self._text = self._text[end:]
        self._step = self._read_content
        return True

    def _add_content(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))


class _Breaks:
    """Holds back line breaks at the end of a text until more than line breaks follows."""

    def __init__(self) -> None:
        self.held = ""
        self._has_text = False
        self._drops_leading = False

    def hold(self, text: str) -> str:
        """Return what is certain of `text`, which comes after what is held."""
        text = self.held + text
        if self._drops_leading and not self._has_text:
            text = text.lstrip("\n")
        certain = text.rstrip("\n")
        self.held = text[len(certain) :]
        self._has_text = self._has_text or bool(certain)
        return certain

    def drop_leading(self) -> None:
        """Drop line breaks that stand before all else."""
        self._drops_leading = True
        self.held = self.held if self._has_text else ""


def overlap(text: str, pattern: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `pattern`, but are not all of it."""
    longest = min(len(text), len(pattern) - 1)
    return next((length for length in range(longest, 0, -1) if pattern.startswith(text[-length:])), 0)


def parse_answer(text: str, *, with_tools: bool, reasoning_is_open: bool, with_reasoning: bool = True) -> Answer:
    """Read a completion's text, its stop token taken off. The parameters are those of `AnswerParser`."""
    parser = AnswerParser(with_tools=with_tools, reasoning_is_open=reasoning_is_open, with_reasoning=with_reasoning)
    return joined([*parser.push(text), *parser.finish()])


def reasoning_is_open(prompt_text: str) -> bool:
    """Whether a prompt's text ends within reasoning that it opened itself."""
    return prompt_text.rstrip().endswith(_THINK_OPEN)


def joined(parts: Iterable[Part]) -> Answer:
    """Return the answer that all its parts make."""
    parts = list(parts)
    reasoning = [part.text for part in parts if isinstance(part, Reasoning)]
    return Answer(
        "".join(part.text for part in parts if isinstance(part, Content)),
        "".join(reasoning) if reasoning else None,
        tuple(part for part in parts if isinstance(part, ToolCall)),
    )
