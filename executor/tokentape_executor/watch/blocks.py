"""The blocks that a tape is shown in: rows of a label and a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from tokentape.v1 import types_pb2
from tokentape_executor.watch import words
from tokentape_executor.watch.look import MARKUP, Ids, Look, given_text, role_style, sampled_text, token_text
from tokentape_executor.watch.reel import Call, Choice
from tokentape_executor.watch.turns import Turn, turns_of

LABEL_WIDTH = 9

_HEAD_TOKENS, _TAIL_TOKENS = 160, 60
"""What is shown of a long turn."""
_ENDINGS = {
    types_pb2.FINISH_REASON_STOP: "green",
    types_pb2.FINISH_REASON_LENGTH: "yellow",
    types_pb2.FINISH_REASON_ABORT: "red",
    types_pb2.FINISH_REASON_REPETITION: "red",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a block."""

    label: str
    label_style: str
    text: Text


def title(call: Call) -> Text:
    """Return the head line of a call."""
    style = "bold yellow" if words.is_split(call) else "green" if call.parent else ""
    lora = f"LoRA {call.started.lora_name}" if call.started and call.started.lora_name else ""
    more = [each for each in (words.prompt_size(call), lora) if each]
    return Text.assemble(
        (words.name_of(call), "bold"), "  ", (words.origin(call), style), *((f"  {each}", MARKUP) for each in more)
    )


def prompt_rows(call: Call, look: Look) -> Iterator[Row]:
    """Yield the prompt, turn by turn."""
    if call.started is None:
        return
    ids, pieces = call.started.prompt_token_ids, call.prompt_pieces()
    for turn in turns_of(pieces):
        label = turn.role or ("template" if call.parent else "prompt")
        yield Row(label, role_style(turn.role), _turn_text(turn, ids, pieces, look))


def sampling_row(call: Call) -> Row:
    """Return the parameters in force."""
    return Row("sampling", MARKUP, Text(words.sampling(call), MARKUP))


def choice_rows(call: Call, choice: Choice, look: Look) -> Iterator[Row]:
    """Yield what a choice has sampled, and how it ended."""
    yield Row(choice_label(call, choice), "bold", choice_text(choice, look))
    yield Row("", "", _facts(choice, look))


def choice_label(call: Call, choice: Choice) -> str:
    """Return what a choice is called."""
    return f"choice {choice.index}" if call.choice_count > 1 else "sampled"


def choice_text(choice: Choice, look: Look, start: int = 0) -> Text:
    """Return a choice's tokens from `start` on, with a mark wherever other weights come into force."""
    text = Text()
    bounds = [(begin, weights) for begin, weights in choice.weights if begin > start]
    for end, weights in [*bounds, (len(choice.token_ids), None)]:
        part = slice(start, end)
        text += sampled_text(choice.token_ids[part], choice.pieces[part], choice.logprobs[part], look.ids)
        if weights is not None:
            text.append(f"⟦{words.weights_words(weights)}⟧", "bold reverse cyan")
        start = end
    return text


def failure_row(message: str) -> Row:
    """Return why a call failed."""
    return Row("failed", "bold red", Text(message, "red"))


def _facts(choice: Choice, look: Look) -> Text:
    completion = choice.completion
    style = _ENDINGS.get(completion.finish_reason, "") if completion else "red"
    ids = look.ids if any(choice.pieces) else Ids.INSTEAD
    quoted = [
        token_text(token_id, repr(piece) if piece else "", ids).strip()
        for token_id, piece in zip(choice.token_ids, choice.pieces, strict=True)
    ]
    least = words.least_expected(choice, quoted)
    facts = [
        words.tokens(len(choice.token_ids)),
        words.mean_logprob(choice),
        f"least expected {least}" if least else "",
        words.all_weights(choice),
    ]
    return Text.assemble((words.ending(choice), style), *((f" · {fact}", MARKUP) for fact in facts if fact))


def _turn_text(turn: Turn, ids: Sequence[int], pieces: Sequence[str], look: Look) -> Text:
    style = role_style(turn.role)
    # What is no more than a line break is shown as one; a mark and its line break stay on the line.
    is_blank = not "".join(pieces[turn.start : turn.end]).strip("\n")
    content = turn.end if is_blank and any(pieces[turn.start : turn.end]) else turn.start + turn.mark_count

    def given(start: int, end: int, how: str = style) -> Text:
        return given_text(ids[start:end], pieces[start:end], how, look.ids)

    text = Text().append(given(turn.start, content).plain.replace("\n", "⏎"), MARKUP)
    left_out = 0 if look.full else turn.end - content - _HEAD_TOKENS - _TAIL_TOKENS
    if left_out > 0:
        text += given(content, content + _HEAD_TOKENS)
        text.append(f"\n⋯ {words.tokens(left_out)} more; --full shows them ⋯\n", MARKUP)
        content = turn.end - _TAIL_TOKENS
    text += given(content, turn.end)
    text.rstrip()
    return text
