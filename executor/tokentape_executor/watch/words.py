"""What a tape says, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from tokentape.v1 import types_pb2
from tokentape_executor.watch.reel import Call, Choice, Weights

_CAUSES = {
    types_pb2.SPLIT_CAUSE_UNSPECIFIED: "nobody said why",
    types_pb2.SPLIT_CAUSE_NEW_CONVERSATION: "a new conversation",
    types_pb2.SPLIT_CAUSE_HISTORY_EDITED: "an answer in the history is not what was sampled",
    types_pb2.SPLIT_CAUSE_ANSWER_INSERTED: "the agent put in an answer of its own",
    types_pb2.SPLIT_CAUSE_TOOLS_CHANGED: "the tools are others",
    types_pb2.SPLIT_CAUSE_TEMPLATE_ARGUMENTS_CHANGED: "the template's arguments are others",
    types_pb2.SPLIT_CAUSE_SPECIAL_TOKEN_TEXT: "text spells a special token",
    types_pb2.SPLIT_CAUSE_TEMPLATE_ERROR: "the template cannot render the conversation",
    types_pb2.SPLIT_CAUSE_TEMPLATE_REWRITES_HISTORY: "the template renders earlier messages differently now",
    types_pb2.SPLIT_CAUSE_TEMPLATE_STRIPS_REASONING: "the template leaves earlier reasoning out",
    types_pb2.SPLIT_CAUSE_TERMINATOR_DIFFERS: "the answer ends on another token than the template's",
    types_pb2.SPLIT_CAUSE_MESSAGE_LOST: "the template drops or alters a new message",
    types_pb2.SPLIT_CAUSE_PARENT_INCOMPLETE: "the call to continue was aborted, failed or still runs",
    types_pb2.SPLIT_CAUSE_CONTINUATION_OFF: "the bridge renders every prompt anew",
    types_pb2.SPLIT_CAUSE_LORA_CHANGED: "the LoRA adapter is another",
}
_CAUSE_PREFIX = "SPLIT_CAUSE_"
_REASON_PREFIX = "FINISH_REASON_"
_LEAST_EXPECTED = 3
_LIKELY = math.log(0.5)
_ID_CHARACTERS = 12


def name_of(call: Call) -> str:
    """Return what a call is called: by its index, or where that is not known by the beginning of its id."""
    return f"call {call.started.call_index}" if call.started else call.call_id[: len("call-") + _ID_CHARACTERS]


def is_split(call: Call) -> bool:
    """Whether the call begins a sample although a conversation was there that it might have continued."""
    started = call.started
    natural = {types_pb2.SPLIT_CAUSE_NEW_CONVERSATION, types_pb2.SPLIT_CAUSE_UNSPECIFIED}
    return started is not None and not started.HasField("parent") and started.split_cause not in natural


def origin(call: Call) -> str:
    """Return where a call's prompt comes from: which call it continues, or why none."""
    started = call.started
    if started is None:
        return "began before the first entry that was asked for"
    if call.parent is None:
        cause = types_pb2.SplitCause.Name(started.split_cause).removeprefix(_CAUSE_PREFIX).lower()
        words = _CAUSES.get(started.split_cause, "")
        if not is_split(call):
            return words
        return f"split: {cause}" + (f" ({words})" if words else "")
    reference = started.parent
    choice = f" choice {reference.choice}" if reference.choice else ""
    given = call.parent.choices.get(reference.choice)
    is_fork = reference.HasField("offset") and given is not None and reference.offset < len(given.token_ids)
    place = f" up to its token {reference.offset}" if is_fork else ""
    return f"continues {name_of(call.parent)}{choice}{place}"


def prompt_size(call: Call) -> str:
    """Return how long a prompt is."""
    started = call.started
    if started is None:
        return ""
    new = len(started.prompt_token_ids)
    return tokens(started.prompt_token_count) + (f", {new:,} new" if call.parent else "")


def sampling(call: Call) -> str:
    """Return the parameters in force, as `temperature 0.7, top_p 0.9`."""
    if call.started is None:
        return ""
    fields: dict[str, Any] = MessageToDict(call.started.sampling, preserving_proto_field_name=True)
    return ", ".join(f"{name} {_value(value)}" for name, value in fields.items())


def _value(value: object) -> str:
    # 64-bit integers come as strings.
    if isinstance(value, str) and value.lstrip("-").isdecimal():
        return value
    return f"{value:g}" if isinstance(value, float) else repr(value)


def ending(choice: Choice) -> str:
    """Return how a choice ended."""
    completion = choice.completion
    if completion is None:
        return "cut off"
    reason = types_pb2.FinishReason.Name(completion.finish_reason).removeprefix(_REASON_PREFIX).lower()
    match completion.WhichOneof("stop_reason"):
        case "stop_token_id":
            return f"{reason} (token {completion.stop_token_id})"
        case "stop_string":
            return f"{reason} ({completion.stop_string!r})"
        case None:
            return reason


def weights_words(weights: Weights) -> str:
    """Return a version and its marks."""
    marks = [
        *(["boundary uncertain"] if weights.boundary_uncertain else []),
        *(["stale cache"] if weights.stale_cache else []),
    ]
    return f"weights {weights.version or 'unnamed'}" + (f" ({', '.join(marks)})" if marks else "")


def all_weights(choice: Choice) -> str:
    """Return the versions that sampled a choice, with where they begin; empty: one, and nobody named it."""
    first, *later = choice.weights or [(0, Weights(""))]
    if not later and first[1] == Weights(""):
        return ""
    return " → ".join(
        [weights_words(first[1]), *(f"{weights_words(each)} from token {start}" for start, each in later)]
    )


def least_expected(choice: Choice, texts: Sequence[str]) -> str:
    """Return the least probable tokens, worst first, of those that were not likely; `texts` shows each token."""
    unlikely = [index for index, logprob in enumerate(choice.logprobs) if logprob < _LIKELY]
    order = sorted(unlikely, key=choice.logprobs.__getitem__)[:_LEAST_EXPECTED]
    return ", ".join(f"{texts[index]} {choice.logprobs[index]:.2f}" for index in order)


def mean_logprob(choice: Choice) -> str:
    """Return the mean log-probability, in nats."""
    if not choice.logprobs:
        return ""
    return f"mean log-probability {math.fsum(choice.logprobs) / len(choice.logprobs):.2f}"


def tokens(count: int) -> str:
    """Return a number of tokens."""
    return f"{count:,} token{'' if count == 1 else 's'}"


def calls(count: int) -> str:
    """Return a number of calls."""
    return f"{count:,} call{'' if count == 1 else 's'}"
