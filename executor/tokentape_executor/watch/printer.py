"""What happens on a tape, printed block by block: as tables on a terminal, as plain lines elsewhere.

A call is printed when it begins, a choice when it has ended: what several calls sample at the same time stays apart.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tokentape_executor.shades import probability_legend
from tokentape_executor.watch import blocks, words
from tokentape_executor.watch.blocks import LABEL_WIDTH, Row
from tokentape_executor.watch.look import MARKUP, Look
from tokentape_executor.watch.reel import Call, CallBegun, CallBroken, ChoiceEnded, ChoiceGrown, Happening, ReelEnded


class Printer:
    """Prints on a console."""

    def __init__(self, console: Console, look: Look, *, plain: bool) -> None:
        """`plain`: lines that are cut at line breaks only, for other programs."""
        self._console = console
        self._look = look
        self._plain = plain
        self._last: Call | None = None
        self._sampling = ""

    def show(self, happening: Happening) -> None:
        """Print what there is to print."""
        match happening:
            case CallBegun(call=call):
                self._begin(call)
            case ChoiceEnded(call=call, choice=choice):
                self._return_to(call)
                self._rows(blocks.choice_rows(call, choice, self._look))
            case CallBroken(call=call, message=message):
                self._break(call, message)
            case ReelEnded():
                self._end(happening)
            case ChoiceGrown():
                pass

    def say(self, text: str) -> None:
        """Print a remark."""
        self._console.print(Text(text, MARKUP), soft_wrap=True)

    def _begin(self, call: Call) -> None:
        self._head(blocks.title(call))
        self._last = call
        self._rows(blocks.prompt_rows(call, self._look))
        sampling = words.sampling(call)
        if sampling != self._sampling:
            self._sampling = sampling
            self._rows([blocks.sampling_row(call)])

    def _return_to(self, call: Call) -> None:
        """Say which call it is about, unless that is where we are."""
        if self._last is not call:
            self._head(Text(words.name_of(call), "bold"))
            self._last = call

    def _break(self, call: Call, message: str) -> None:
        self._return_to(call)
        for choice in call.choices.values():
            if choice.completion is None and choice.token_ids:
                self._rows(blocks.choice_rows(call, choice, self._look))
        self._rows([blocks.failure_row(message)])

    def _end(self, end: ReelEnded) -> None:
        counts = f"  {words.calls(end.call_count)}, {words.tokens(end.sampled_token_count)} sampled"
        self._head(Text.assemble(("sealed", "bold"), (counts, MARKUP)))
        if not self._plain:
            # What is live goes away in the end, and its key to the colours with it; this one stays.
            self._console.print(probability_legend(), no_wrap=True, overflow="ellipsis")

    def _head(self, text: Text) -> None:
        self._console.print()
        if self._plain:
            self._console.print(text, soft_wrap=True)
        else:
            self._console.print(Rule(text, align="left", style="bright_black"))

    def _rows(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if self._plain:
                self._console.print(_lines(row), soft_wrap=True)
            else:
                self._console.print(grid([row]))


def grid(rows: Iterable[Row]) -> RenderableType:
    """Return rows as a table without lines."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True, min_width=LABEL_WIDTH, max_width=LABEL_WIDTH)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(Text(row.label, row.label_style), row.text)
    return table


def _lines(row: Row) -> Text:
    """Return a row with its label before each of its lines."""
    label = Text(f"{row.label:>{LABEL_WIDTH}} | ", row.label_style)
    lines = row.text.split("\n", allow_blank=not row.text.plain) or [Text()]
    return Text("\n").join(Text.assemble(label, line) for line in lines)
