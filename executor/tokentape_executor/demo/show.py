"""Rollouts for people: the prompt dim, every sampled token in a colour that says how probable it was (see `shades`).

Where there are no colours, bars separate the sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tokentape_executor.demo.transcript import Span, Transcript
from tokentape_executor.shades import probability_legend, shade, visible

_SURPRISES = 3


def legend(console: Console) -> Text:
    """Return the key to the colours, or to the bars where `console` has no colours."""
    if not console.color_system:
        return Text("prompt: as it was given · sampled: a bar │ after every token")
    return Text.assemble(("prompt", "dim"), "   ", probability_legend())


def span_text(transcript: Transcript, span: Span, *, colours: bool) -> Text:
    """Return the text of `span`."""
    pieces = [visible(piece) for piece in transcript.pieces[span.start : span.end]]
    if not span.sampled:
        return Text("".join(pieces).rstrip("\n"), "dim")
    text = Text()
    for piece, log_prob in zip(pieces, transcript.rollout_log_probs[span.start : span.end], strict=True):
        # A line break is a token too; let it be seen.
        shown = piece.replace("\n", "⏎\n")
        if not colours:
            # At a line's end rather than at the beginning of the next.
            shown = shown[:-1] + "│\n" if shown.endswith("\n") else shown + "│"
        text.append(shown, shade(log_prob))
    return text


def rollout_panel(number: int, transcript: Transcript, *, colours: bool) -> Panel:
    """Return a rollout in a frame that is green where it was rewarded."""
    tape = Table.grid(padding=(0, 2, 0, 0))
    tape.add_column(justify="right", style="bold", no_wrap=True)
    tape.add_column(overflow="fold")
    for span in transcript.spans():
        tape.add_row("sampled" if span.sampled else "prompt", span_text(transcript, span, colours=colours))
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(justify="right", style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(transcript):
        facts.add_row(name, value)
    style = "green" if transcript.reward > 0 else "yellow"
    return Panel(
        Group(tape, Text(), facts),
        title=Text.assemble((f" {number} ", f"bold reverse {style}"), (f" {transcript.prompt} ", "bold")),
        subtitle=Text(f" reward {transcript.reward:g} ", f"bold {style}"),
        title_align="left",
        subtitle_align="right",
        border_style=style,
        padding=(1, 2),
    )


def failure_panel(number: int, prompt: str, error: Exception) -> Panel:
    """Return a rollout that failed, in a red frame."""
    title = Text.assemble((f" {number} ", "bold reverse red"), (f" {prompt} ", "bold"))
    body = Text(f"{type(error).__name__}: {error}")
    return Panel(body, title=title, title_align="left", border_style="red", padding=(1, 2))


def summary(transcripts: Sequence[Transcript], seconds: float) -> RenderableType:
    """Return one line about all `transcripts`, which took `seconds` together."""
    sampled = sum(len(transcript.sampled_positions()) for transcript in transcripts)
    rewarded = sum(transcript.reward > 0 for transcript in transcripts)
    return Text.assemble(
        (f"{len(transcripts)} rollouts", "bold"),
        f", {rewarded} rewarded · {sampled} tokens sampled in {seconds:.1f} s",
    )


def _facts(transcript: Transcript) -> Iterator[tuple[str, RenderableType]]:
    """Yield names and values of what there is to say about a transcript."""
    positions = transcript.sampled_positions()
    given = len(transcript.observation_tokens) - len(positions)
    mean = transcript.mean_log_prob()
    yield "label", Text(transcript.label)
    yield "tokens", Text(f"{given} prompt + {len(positions)} sampled = {len(transcript.observation_tokens)}")
    yield "action ranges", Text(", ".join(f"[{start}, {end})" for start, end in transcript.action_ranges))
    yield "log-probability", Text(f"mean {mean:.2f}, perplexity {math.exp(-mean):.2f}")
    surprises = sorted(positions, key=transcript.rollout_log_probs.__getitem__)[:_SURPRISES]
    yield (
        "least expected",
        Text(", ".join(f"{transcript.pieces[p]!r} {transcript.rollout_log_probs[p]:.2f}" for p in surprises)),
    )
    yield "finish", Text("cut short by a length limit" if transcript.truncated else "stopped by itself")
