"""How the demo shows rollouts: with colours, without them, and where they failed."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from tokentape_executor.demo import show
from tokentape_executor.demo.transcript import Span, Transcript
from tokentape_executor.errors import AgentFailed

LOG_PROBS = (0.0, 0.0, math.log(0.95), math.log(0.3), math.log(0.001))


def transcript(pieces: tuple[str, ...] = ("ask", ":", "5", "\n", "<|end|>"), *, reward: float = 1.0) -> Transcript:
    return Transcript(
        prompt="What is 2 + 3?",
        label="5",
        reward=reward,
        truncated=False,
        action_ranges=((2, 5),),
        observation_tokens=(10, 11, 12, 13, 14),
        rollout_log_probs=LOG_PROBS,
        pieces=pieces,
        tape_id="main.00",
    )


def printed(*parts: object, colours: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=100, force_terminal=colours, color_system="truecolor" if colours else None
    )
    console.print(*parts)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("edge", [1.0, 0.9, 0.5, 0.1, 0.01])
def test_a_less_probable_token_is_shaded_otherwise(edge: float) -> None:
    below = math.log(edge) - 0.01

    assert show.shade(math.log(edge)) == show.shade(math.log(edge) + 1e-9)
    assert (show.shade(below) == show.shade(math.log(edge))) is (edge == 1.0)


def test_the_most_improbable_token_has_a_shade() -> None:
    assert show.shade(-1000.0)


def test_without_colours_bars_separate_sampled_tokens_and_no_others() -> None:
    text = show.span_text(transcript(), Span(2, 5, sampled=True), colours=False)

    assert text.plain == "5│⏎│\n<|end|>│"
    assert show.span_text(transcript(), Span(0, 2, sampled=False), colours=False).plain == "ask:"


def test_with_colours_each_sampled_token_has_the_shade_of_its_probability() -> None:
    text = show.span_text(transcript(), Span(2, 5, sampled=True), colours=True)

    assert [span.style for span in text.spans] == [show.shade(value) for value in LOG_PROBS[2:]]


def test_control_characters_do_not_reach_the_terminal() -> None:
    hostile = transcript(("\x1b[2J", ":", "\x1b]0;x\x07", "\r", "\x7f"))

    output = printed(show.rollout_panel(1, hostile, colours=False))

    assert "␛[2J" in output
    assert not set(output) & {"\x1b", "\x07", "\r", "\x7f"}


def test_a_panel_says_what_there_is_to_know() -> None:
    output = printed(show.rollout_panel(2, transcript(), colours=False))

    for fact in (
        "2",
        "What is 2 + 3?",
        "reward 1",
        "2 prompt + 3 sampled = 5",
        "[2, 5)",
        "mean -2.72",
        "'<|end|>' -6.91",
    ):
        assert fact in output


def test_a_panel_on_a_terminal_uses_colours() -> None:
    output = printed(show.rollout_panel(2, transcript(), colours=True), colours=True)

    assert "\x1b[1;38;2;255;255;255;48;2;59;28;117m5" in output


def test_the_legend_explains_what_is_there() -> None:
    assert "│" in show.legend(Console(color_system=None)).plain
    coloured = show.legend(Console(force_terminal=True, color_system="truecolor")).plain
    assert "≥ 0.9" in coloured
    assert "< 0.01" in coloured


def test_a_failure_is_shown_with_its_cause() -> None:
    output = printed(show.failure_panel(3, "What is 2 + 3?", AgentFailed("agent x answered 500: [broken]")))

    assert "AgentFailed: agent x answered 500: [broken]" in output


def test_the_summary_counts() -> None:
    output = printed(show.summary([transcript(), transcript(reward=0.0)], 2.5))

    assert output.startswith("2 rollouts, 1 rewarded · 6 tokens sampled in 2.5 s")
