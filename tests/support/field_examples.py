"""For each field of the bridge's requests: a value that asks for something, in a request where that shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from support.answering import OTHER_TOKENS_SEED

Json = dict[str, Any]

TAPE = "TAPE"
"""Stands for the id of a tape that is open."""
FIRST, SECOND = "FIRST", "SECOND"
"""Stand for the prompt and completion, in two columns, of two calls of the tape that gave the same answer."""

TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
QUESTION = {"role": "user", "content": "Hello"}
CALL = {"id": "c0", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
ELSEWHERE = "b." + "0" * 32
"""The id of a tape on a sidecar that the bridge has not."""


@dataclass(frozen=True, slots=True)
class Example:
    """`value` of a field; `beside` are the fields that a request needs for it to show."""

    value: Any
    beside: Json = field(default_factory=dict[str, Any])
    status: int = 200
    """What the request with the field is answered, where the field is supported."""


def message(value: Any, *, name: str, role: str = "user", **others: Any) -> Example:
    """The field `name` of a message, of which `others` are the other fields."""
    given = {"role": role, "content": "Hello", **others}
    return Example([QUESTION, {**given, name: value}, QUESTION], {"messages": [QUESTION, given, QUESTION]})


ANSWERED = {"metadata": {"tape_id": TAPE}, "return_token_ids": True}
PAIR = {"prompt_token_ids": FIRST, "generation_token_ids": SECOND}


def echoed(*names: str) -> list[Json]:
    """A history whose answer two calls of the tape gave."""
    return [QUESTION, {"role": "assistant", "content": "ANSWER", **{name: PAIR[name] for name in names}}, QUESTION]


SAMPLING: Mapping[str, Example] = {
    "temperature": Example(0.5),
    "top_p": Example(0.5),
    "top_k": Example(5),
    "min_p": Example(0.1),
    "presence_penalty": Example(0.5),
    "frequency_penalty": Example(0.5),
    "repetition_penalty": Example(1.5),
    "seed": Example(OTHER_TOKENS_SEED),
    "n": Example(2),
    "stop": Example("zebra"),
    "stop_token_ids": Example([7]),
    "ignore_eos": Example(True),
    "logit_bias": Example({"5": 1}),
    "bad_words": Example(["bad"]),
    "allowed_token_ids": Example([5]),
    "min_tokens": Example(2),
    "max_tokens": Example(3),
    "priority": Example(3),
    "cache_salt": Example("salt"),
    "response_format": Example({"type": "json_object"}),
    "structured_outputs": Example({"regex": "a+"}),
    "return_token_ids": Example(True),
    "skip_special_tokens": Example(False),
    "stream": Example(True),
    "stream_options": Example({"include_usage": True}, {"stream": True}),
    "best_of": Example(2),
    "use_beam_search": Example(True),
    "include_stop_str_in_output": Example(True),
    "truncate_prompt_tokens": Example(5),
    "prompt_embeds": Example("AAAA"),
    "guided_json": Example({"type": "object"}),
    "guided_regex": Example("a+"),
    "guided_choice": Example(["a"]),
    "guided_grammar": Example("root ::= 'a'"),
    "store": Example(True),
    "service_tier": Example("auto"),
    "prompt_cache_key": Example("k"),
    "safety_identifier": Example("s"),
}

SOURCE: Mapping[str, Example] = {
    "messages": Example([{"role": "user", "content": "Bye"}]),
    "tools": Example(TOOLS),
    "chat_template_kwargs": Example({"shout": True}),
    "reasoning_effort": Example("low"),
    "add_generation_prompt": Example(False),
    "continue_final_message": Example(
        True, {"messages": [QUESTION, {"role": "assistant", "content": "Well"}], "add_generation_prompt": False}
    ),
    "chat_template": Example("{{ messages }}"),
    "documents": Example([{"text": "x"}]),
    "mm_processor_kwargs": Example({"a": 1}),
    "messages[].role": message("developer", name="role"),
    "messages[].content": message("Ho", name="content"),
    "messages[].name": message("Ann", name="name"),
    "messages[].tool_calls": message([CALL], name="tool_calls", role="assistant"),
    "messages[].tool_call_id": message("c0", name="tool_call_id", role="tool"),
    "messages[].reasoning_content": message("hm", name="reasoning_content", role="assistant"),
    "messages[].reasoning": message("hm", name="reasoning", role="assistant"),
    "messages[].generation_log_probs": message([-0.5], name="generation_log_probs", role="assistant"),
    "messages[].refusal": message("no", name="refusal", role="assistant"),
    "messages[].function_call": message({"name": "ls"}, name="function_call", role="assistant"),
    "messages[].audio": message({"id": "a"}, name="audio", role="assistant"),
}

CHAT: Mapping[str, Example] = {
    **SAMPLING,
    **SOURCE,
    "model": Example("adapter"),
    "metadata": Example({"tape_id": TAPE}),
    "user": Example(TAPE),
    "max_completion_tokens": Example(3),
    "tool_choice": Example("none", {"tools": TOOLS}),
    "parallel_tool_calls": Example(False, {"tools": TOOLS}),
    "add_special_tokens": Example(True),
    "logprobs": Example(True),
    "top_logprobs": Example(2, {"logprobs": True}),
    "prompt_logprobs": Example(1),
    "return_tokens_as_token_ids": Example(True, {"logprobs": True}),
    "echo": Example(True),
    "functions": Example(TOOLS),
    "function_call": Example("auto"),
    "modalities": Example(["text", "audio"]),
    "audio": Example({"voice": "x"}),
    "web_search_options": Example({}),
    "include_reasoning": Example(False),
    "prediction": Example({"type": "content", "content": "x"}),
    "verbosity": Example("low"),
    "required_prefix_token_ids": Example(FIRST + SECOND, {**ANSWERED, "messages": echoed()}),
    "messages[].prompt_token_ids": Example(echoed(*PAIR), {**ANSWERED, "messages": echoed("generation_token_ids")}),
    "messages[].generation_token_ids": Example(echoed(*PAIR), {**ANSWERED, "messages": echoed("prompt_token_ids")}),
}

COMPLETIONS: Mapping[str, Example] = {
    **SAMPLING,
    "prompt": Example("Bye"),
    "model": Example("adapter"),
    "metadata": Example({"tape_id": TAPE}),
    "user": Example(TAPE),
    # SmolLM2's tokenizer adds none, and so do most: what shows is that the field is one.
    "add_special_tokens": Example("yes", status=400),
    "logprobs": Example(2),
    "prompt_logprobs": Example(1),
    "return_tokens_as_token_ids": Example(True, {"logprobs": 0}),
    "echo": Example(True),
    "suffix": Example("end"),
}

TOKENIZE: Mapping[str, Example] = {
    **SOURCE,
    "model": Example("other", status=404),
    "metadata": Example({"tape_id": ELSEWHERE}, status=400),
    "user": Example(ELSEWHERE, status=400),
    "prompt": Example("Bye", {"messages": None, "prompt": "Hello"}),
    "add_special_tokens": Example("yes", status=400),
    "return_token_strs": Example(True),
    "required_prefix_token_ids": Example(FIRST + SECOND, {"metadata": {"tape_id": TAPE}, "messages": echoed()}),
    "messages[].prompt_token_ids": Example(
        echoed(*PAIR), {"metadata": {"tape_id": TAPE}, "messages": echoed("generation_token_ids")}
    ),
    "messages[].generation_token_ids": Example(
        echoed(*PAIR), {"metadata": {"tape_id": TAPE}, "messages": echoed("prompt_token_ids")}
    ),
}

DETOKENIZE: Mapping[str, Example] = {
    "tokens": Example([6]),
    "model": Example("other", status=404),
    "metadata": Example({"tape_id": ELSEWHERE}, status=400),
    "user": Example(ELSEWHERE, status=400),
}

EXAMPLES: Mapping[str, Mapping[str, Example]] = {
    "Chat": CHAT,
    "Completions": COMPLETIONS,
    "Tokenize": TOKENIZE,
    "Detokenize": DETOKENIZE,
}
"""By the column of the table."""

BASES: Mapping[str, Json] = {
    "Chat": {"messages": [QUESTION]},
    "Completions": {"prompt": "Hello"},
    "Tokenize": {"messages": [QUESTION]},
    "Detokenize": {"tokens": [5]},
}
"""The least that a request must have."""
