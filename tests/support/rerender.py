"""What a trainer would train on that has no token ids: the finished conversation, rendered and tokenised once more.

It takes messages and tool calls from the agent's report, applies the chat template, and marks what the template writes
for each assistant message, its terminator included, as sampled. `compare` says how far that is from what was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

from tokentape_executor.trajectory import Sample

Message = dict[str, Any]

_END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Rerendered:
    """A conversation's token ids, and the half-open ranges of them that count as sampled, one per answer."""

    token_ids: list[int]
    spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Drift:
    """How a re-render differs from what was sampled; all counts are of tokens."""

    sampled: int
    """Sampled by the engine."""
    missing: int
    """Sampled, but not among what the re-render marks for that answer."""
    misplaced: int
    """Sampled and marked, but after a prefix that the engine never had."""
    invented: int
    """Marked as sampled in the re-render, but never sampled there."""
    tokens: int
    """Of the re-render."""

    @property
    def exact(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.misplaced or self.invented)


def conversation(report: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    """Return messages and tools, as a chat template takes them, of a report of Gym; up to the last answer."""
    params = report["responses_create_params"]
    messages: list[Message] = []
    for item in (*params["input"], *report["response"]["output"]):
        _add(messages, item)
    while messages[-1]["role"] != "assistant":
        messages.pop()
    # The keys in the order in which Gym's model server sends them, and so the bridge renders them.
    tools = [
        {"function": {key: tool[key] for key in ("name", "description", "parameters")}, "type": "function"}
        for tool in params["tools"]
    ]
    return messages, tools


def _add(messages: list[Message], item: Mapping[str, Any]) -> None:
    """Add an item of the Responses API; what follows an answer's item of the same answer goes into one message."""
    match item.get("type") or "message":
        case "function_call":
            call = {"name": item["name"], "arguments": json.loads(item["arguments"])}
            _answer(messages).setdefault("tool_calls", []).append({"type": "function", "function": call})
        case "function_call_output":
            messages.append({"role": "tool", "content": item["output"]})
        case "message" if item["role"] == "assistant":
            _answer(messages)["content"] += "".join(part["text"] for part in item["content"])
        case "message":
            # No template knows developers; the bridge calls them so too.
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": item["content"]})
        case kind:
            raise ValueError(f"an item of type {kind}")


def _answer(messages: list[Message]) -> Message:
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def rerender(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message]) -> Rerendered:
    """Render and tokenise a conversation. `tokenizer` is one of transformers, with a template."""

    def text_of(part: Sequence[Message], *, opens_answer: bool) -> str:
        text = tokenizer.apply_chat_template(
            list(part), tools=list(tools), tokenize=False, add_generation_prompt=opens_answer
        )
        assert isinstance(text, str)
        return text

    whole = text_of(messages, opens_answer=False)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    starts: list[int] = [start for start, _ in encoded["offset_mapping"]]
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = text_of(messages[:index], opens_answer=True)
            assert whole.startswith(before)
            end = whole.index(_END_OF_TURN, len(before)) + len(_END_OF_TURN)
            spans.append((_first_from(starts, len(before)), _first_from(starts, end)))
    return Rerendered(list(encoded["input_ids"]), spans)


def _first_from(starts: Sequence[int], character: int) -> int:
    """Return the first token that begins at `character` or after it."""
    return next((index for index, start in enumerate(starts) if start >= character), len(starts))


def compare(sample: Sample, rerendered: Rerendered) -> Drift:
    """Compare a whole rollout in one sample with its re-render, answer by answer."""
    same = common_prefix(sample.tokens, rerendered.token_ids)
    missing = misplaced = invented = 0
    for (start, end), (first, last) in zip(sample.action_ranges, rerendered.spans, strict=True):
        blocks = matching(sample.tokens[start:end], rerendered.token_ids[first:last])
        matched = [start + offset for a, _, size in blocks for offset in range(a, a + size)]
        missing += end - start - len(matched)
        invented += last - first - len(matched)
        misplaced += sum(position >= same for position in matched)
    return Drift(sample.action_token_count, missing, misplaced, invented, len(rerendered.token_ids))


def repeated(samples: Sequence[Sample]) -> int:
    """Return how many tokens of a rollout's samples were in the sample before already, in the same order."""
    count = 0
    for earlier, later in pairwise(samples):
        same = common_prefix(earlier.tokens, later.tokens)
        count += same + sum(size for *_, size in matching(earlier.tokens[same:], later.tokens[same:]))
    return count


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def matching(one: Sequence[int], other: Sequence[int]) -> Sequence[tuple[int, int, int]]:
    """Return the blocks (start in `one`, start in `other`, length) of an alignment of both."""
    return SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
