"""What `tokentape-watch` prints of a tape: with colours, without them, with ids, and what stays below."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from tokentape.v1 import tape_pb2, types_pb2
from tokentape_executor.shades import probability_legend, shade
from tokentape_executor.watch.look import Ids, Look
from tokentape_executor.watch.printer import Printer
from tokentape_executor.watch.reel import Reel
from tokentape_executor.watch.screen import Screen

PROMPT = ["<|im_start|>", "user", "\n", "Hi", "\x1b[2J", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
SAMPLING = types_pb2.SamplingParameters(temperature=0.7, max_tokens=16, n=1, seed=7, stop=["END"])


def started(call_id: str = "a", index: int = 0, **fields: Any) -> tape_pb2.TapeEntry:
    given: dict[str, Any] = {
        "prompt_token_ids": range(len(PROMPT)),
        "prompt_token_count": 1234,
        "text_pieces": PROMPT,
        "sampling": SAMPLING,
        "split_cause": types_pb2.SPLIT_CAUSE_NEW_CONVERSATION,
        **fields,
    }
    return tape_pb2.TapeEntry(call_started=tape_pb2.TapeEntry.CallStarted(call_id=call_id, call_index=index, **given))


def sampled(
    texts: Sequence[str], logprobs: Sequence[float], call_id: str = "a", choice: int = 0, **fields: Any
) -> tape_pb2.TapeEntry:
    run = tape_pb2.TapeEntry.TokensSampled(
        call_id=call_id,
        choice=choice,
        token_ids=range(100, 100 + len(texts)),
        logprobs=logprobs,
        text_pieces=texts,
        **fields,
    )
    return tape_pb2.TapeEntry(tokens_sampled=run)


def finished(
    reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_STOP,
    call_id: str = "a",
    choice: int = 0,
    **fields: Any,
) -> tape_pb2.TapeEntry:
    completion = types_pb2.Completion(choice=choice, finish_reason=reason, **fields)
    return tape_pb2.TapeEntry(choice_finished=tape_pb2.TapeEntry.ChoiceFinished(call_id=call_id, completion=completion))


def failed(message: str) -> tape_pb2.TapeEntry:
    return tape_pb2.TapeEntry(call_failed=tape_pb2.TapeEntry.CallFailed(call_id="a", message=message))


SEALED = tape_pb2.TapeEntry(tape_sealed=tape_pb2.TapeEntry.TapeSealed(call_count=2, sampled_token_count=1500))


def console_of(*, colours: bool) -> Console:
    return Console(
        file=io.StringIO(),
        width=120,
        height=30,
        force_terminal=colours,
        color_system="truecolor" if colours else None,
        highlight=False,
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def printed(*entries: tape_pb2.TapeEntry, look: Look | None = None, colours: bool = False) -> str:
    console, reel = console_of(colours=colours), Reel()
    printer = Printer(console, look or Look(), plain=not colours)
    for entry in entries:
        if happening := reel.take(entry):
            printer.show(happening)
    return written(console)


def below(*entries: tape_pb2.TapeEntry) -> str:
    console, reel = console_of(colours=False), Reel()
    for entry in entries:
        reel.take(entry)
    console.print(Screen(console, reel, Look(), "main.12345678…").renderable())
    return written(console)


def test_a_whole_call_in_plain_lines() -> None:
    run = sampled(["Yes", "\n", ".", "<|im_end|>"], [-0.01, -0.92, -5.25, -0.1], weight_version="3")
    assert printed(started(), run, finished(), SEALED).splitlines() == [
        "",
        "call 0  a new conversation  1,234 tokens",
        "     user | <|im_start|>user⏎Hi␛[2J<|im_end|>",
        "assistant | <|im_start|>assistant⏎",
        " sampling | temperature 0.7, max_tokens 16, n 1, seed 7, stop ['END']",
        "  sampled | Yes⏎",
        "  sampled | .<|im_end|>",
        "          | stop · 4 tokens · mean log-probability -1.57 · least expected '.' -5.25, '\\n' -0.92 · weights 3",
        "",
        "sealed  2 calls, 1,500 tokens sampled",
    ]


def test_a_probability_has_its_colour_and_a_role_its_own() -> None:
    output = printed(started(), sampled(["sure", "odd"], [-0.01, -6.0]), finished(), colours=True)
    for text, logprob in (("sure", -0.01), ("odd", -6.0)):
        red, green, blue = (int(shade(logprob).rpartition("#")[2][at : at + 2], 16) for at in (0, 2, 4))
        assert re.search(rf"48;2;{red};{green};{blue}m{text}\x1b", output)
    assert "\x1b[36mHi" in output
    assert "\x1b[2J" not in output


def test_the_key_to_the_colours_stays_below_a_sealed_tape() -> None:
    key = probability_legend().plain
    assert len(key) < 80
    last = printed(started(), finished(), SEALED, colours=True).splitlines()[-1]
    assert re.sub(r"\x1b\[[\d;]*m", "", last).strip() == key.strip()
    assert key not in printed(started(), finished(), SEALED)


def test_ids_beside_the_text_or_instead_of_it() -> None:
    entries = (started(), sampled(["a", "\n"], [-1.0, -1.0]), finished())
    beside = printed(*entries, look=Look(Ids.BESIDE))
    assert "  sampled | a⟨100⟩⟨101⟩⏎" in beside
    assert "<|im_start|>⟨0⟩user⟨1⟩⟨2⟩⏎Hi⟨3⟩" in beside
    instead = printed(*entries, look=Look(Ids.INSTEAD))
    assert "  sampled | 100 101" in instead
    assert "least expected 100 -1.00, 101 -1.00" in instead
    assert "Hi" not in instead


def test_a_tape_without_text_is_shown_by_its_ids() -> None:
    output = printed(started(text_pieces=[]), sampled([], []), finished())
    assert "prompt | 0 1 2 3 4" in output


def test_a_call_that_continues_says_so_and_where() -> None:
    child = started(
        "b", 1, parent=types_pb2.CallReference(call_id="a"), prompt_token_ids=[1, 2], text_pieces=["\n", "?"]
    )
    assert "call 1  continues call 0  1,234 tokens, 2 new" in printed(started(), child)
    fork = types_pb2.CallReference(call_id="a", choice=1, offset=1)
    run = sampled(["x", "y"], [-1, -1], choice=1)
    output = printed(started(), run, started("b", 1, parent=fork, prompt_token_ids=[1], text_pieces=["\n"]))
    assert "call 1  continues call 0 choice 1 up to its token 1" in output
    assert " template | ⏎" in output


@pytest.mark.parametrize("cause", [cause for cause in types_pb2.SplitCause.values() if cause > 1])
def test_a_split_says_why(cause: types_pb2.SplitCause.ValueType) -> None:
    name = types_pb2.SplitCause.Name(cause).removeprefix("SPLIT_CAUSE_").lower()
    assert re.search(
        rf"^call 1  split: {name} \(\w[^)]+\)  ", printed(started(index=1, split_cause=cause)), re.MULTILINE
    )


def test_other_weights_are_marked_at_their_token() -> None:
    runs = [
        sampled(["a", "b"], [-0.1, -0.1], weight_version="1"),
        sampled(["c"], [-0.1], weight_version="2", boundary_uncertain=True),
        sampled(["d"], [-0.1], weight_version="2", stale_cache=True),
    ]
    output = printed(started(), *runs, finished())
    assert "| ab⟦weights 2 (boundary uncertain)⟧c⟦weights 2 (stale cache)⟧d" in output
    assert "weights 1 → weights 2 (boundary uncertain) from token 2 → weights 2 (stale cache) from token 3" in output


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (finished(types_pb2.FINISH_REASON_LENGTH), "length · "),
        (finished(types_pb2.FINISH_REASON_ABORT), "abort · "),
        (finished(types_pb2.FINISH_REASON_REPETITION), "repetition · "),
        (finished(stop_string="END"), "stop ('END') · "),
        (finished(stop_token_id=9), "stop (token 9) · "),
    ],
)
def test_how_a_choice_ended(ended: tape_pb2.TapeEntry, told: str) -> None:
    assert f"          | {told}1 token · " in printed(started(), sampled(["x"], [-0.1]), ended)


def test_a_call_that_fails_shows_what_it_had() -> None:
    output = printed(started(), sampled(["half"], [-0.1]), failed("out of memory"))
    assert "  sampled | half\n" in output
    assert "          | cut off · 1 token" in output
    assert "   failed | out of memory" in output


def test_choices_of_calls_that_run_at_once_stay_apart() -> None:
    output = printed(
        started("a", 0, sampling=types_pb2.SamplingParameters(n=2)),
        started("b", 1),
        sampled(["b1"], [-0.1], "b"),
        sampled(["a1"], [-0.1], "a", 1),
        sampled(["b2"], [-0.1], "b"),
        finished(call_id="a", choice=1),
        finished(call_id="b"),
    )
    assert "\ncall 0\n choice 1 | a1\n" in output
    assert "\ncall 1\n  sampled | b1b2\n" in output


def test_parameters_are_told_when_they_change() -> None:
    other = started("c", 2, sampling=types_pb2.SamplingParameters(temperature=0))
    output = printed(started(), started("b", 1), other)
    assert output.count("sampling | ") == 2
    assert "sampling | temperature 0" in output


def test_a_long_turn_is_shortened_unless_it_is_wanted_whole() -> None:
    pieces = ["<|im_start|>", "user", "\n", *(f" w{index}" for index in range(1000)), "<|im_end|>"]
    entry = started(prompt_token_ids=range(len(pieces)), text_pieces=pieces)
    short, whole = printed(entry), printed(entry, look=Look(full=True))
    assert " w159" in short
    assert " w500" not in short
    assert "⋯ 781 tokens more; --full shows them ⋯" in short
    assert short.count(" w") == 1000 - 781
    assert whole.count(" w") == 1000


def test_a_reel_that_begins_in_a_calls_middle() -> None:
    output = printed(sampled(["x"], [-0.1], "call-0123456789abcdef"), finished(call_id="call-0123456789abcdef"))
    assert "call-0123456789ab" in output
    assert "  sampled | x" in output


def test_below_stands_what_is_sampled_now() -> None:
    entries = (started(), sampled(["one", "\n", "two"], [-0.1, -0.1, -3.0], weight_version="2"))
    output = below(*entries)
    assert "one⏎" in output
    assert "two" in output
    assert (
        "main.12345678…  1 call, 1 running · 0 kept, 1 begun anew · 3 tokens sampled · weights 2 · next is 3" in output
    )
    assert probability_legend().plain in output
    assert "two" not in below(*entries, finished())


def test_below_is_no_taller_than_the_screen() -> None:
    tall = sampled(["line\n"] * 290, [-0.1] * 290)
    assert len(below(started(), tall).splitlines()) <= 30
    many = [
        entry
        for index in range(9)
        for entry in (started(f"c{index}", index), sampled(["x\n"] * 40, [-1.0] * 40, f"c{index}"))
    ]
    output = below(*many)
    assert len(output.splitlines()) <= 30
    assert "5 more sample meanwhile" in output
