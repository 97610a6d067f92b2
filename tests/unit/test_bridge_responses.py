"""The text beside the ids, with SmolLM2's real tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tokentape.v1 import types_pb2
from tokentape.v1.generation_pb2 import GenerateResponse
from tokentape.v1.types_pb2 import Completion, TopLogprobs
from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.completion import Call, Choice
from tokentape_bridge.continuation import Prompt
from tokentape_bridge.parents import Conversation
from tokentape_bridge.responses import chat_completion
from tokentape_bridge.schemas import ChatCompletionRequest
from tokentape_bridge.text_logprobs import ColumnWriter, prompt_logprobs
from tokentape_bridge.tokenizer import Tokenizer

IM_END = 2
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.load(model_directory, "sha256")


def answer(
    tokenizer: Tokenizer,
    token_ids: list[int],
    reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_STOP,
    *,
    finish: dict[str, Any] | None = None,
    top: list[Sequence[tuple[int, float]]] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """The one choice of the answer to a request with `fields` for which `token_ids` were sampled."""
    finished = Completion(finish_reason=reason, token_count=len(token_ids), **(finish or {}))
    choice = Choice(token_ids, [-0.5] * len(token_ids), top or [[] for _ in token_ids], finished)
    request = ChatCompletionRequest.model_validate({"messages": [], **fields})
    body = chat_completion(
        request,
        Call("c", 3, [choice]),
        model="m",
        tape_id="",
        prompt=Prompt(PROMPT),
        conversation=Conversation([], None, {}),
        chat=ChatModel(tokenizer, stop_token_ids=[2]),
    )
    return body["choices"][0]


def text(*arguments: Any, **fields: Any) -> str:
    return answer(*arguments, **fields)["message"]["content"]


def encoded(tokenizer: Tokenizer, content: str) -> list[int]:
    return tokenizer.encode(content, add_special_tokens=False)


def test_the_last_token_is_hidden_only_when_it_stopped(tokenizer: Tokenizer) -> None:
    ids = encoded(tokenizer, "one two")
    assert text(tokenizer, [*ids, IM_END]) == "one two"
    assert text(tokenizer, ids, types_pb2.FINISH_REASON_LENGTH) == "one two"
    assert text(tokenizer, ids, finish={"stop_token_id": ids[-1]}) == "one"


def test_special_tokens_show_when_asked_for(tokenizer: Tokenizer) -> None:
    ids = [*encoded(tokenizer, "a"), IM_END, *encoded(tokenizer, "b")]
    assert text(tokenizer, ids, types_pb2.FINISH_REASON_LENGTH) == "ab"
    assert text(tokenizer, ids, types_pb2.FINISH_REASON_LENGTH, skip_special_tokens=False) == "a<|im_end|>b"


def test_text_is_cut_at_the_first_stop_string_that_counts(tokenizer: Tokenizer) -> None:
    ids = encoded(tokenizer, "one END two END")
    stop = {"stop_string": " END"}
    assert text(tokenizer, ids, finish=stop) == "one"
    assert text(tokenizer, ids, finish=stop, min_tokens=len(encoded(tokenizer, "one END two"))) == "one END two"
    assert text(tokenizer, ids, finish={"stop_string": "absent"}) == "one END two END"


def test_whitespace_is_kept(tokenizer: Tokenizer) -> None:
    content = " a , b .\n\n  c 's \n"
    assert text(tokenizer, [*encoded(tokenizer, content), IM_END]) == content


@pytest.mark.parametrize("content", ["\N{HOT PEPPER} née ½", "日本語", "a\tb\r\n\x00", "<|im_start|>x"])
def test_bytes_of_the_tokens_join_to_the_text(tokenizer: Tokenizer, content: str) -> None:
    choice = answer(tokenizer, [*encoded(tokenizer, content), IM_END], logprobs=True, skip_special_tokens=False)
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]).decode() == content
    assert choice["message"]["content"] == content


def test_a_character_cut_by_the_length_leaves_its_bytes(tokenizer: Tokenizer) -> None:
    ids = encoded(tokenizer, "\N{HOT PEPPER}")
    assert len(ids) > 1
    choice = answer(tokenizer, ids[:-1], types_pb2.FINISH_REASON_LENGTH, logprobs=True, return_token_ids=True)
    assert choice["message"]["content"].count("\N{REPLACEMENT CHARACTER}") <= 1
    spelled = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
    assert "\N{HOT PEPPER}".encode().startswith(spelled)
    assert spelled
    assert choice["token_ids"] == ids[:-1]


def test_an_id_outside_the_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    choice = answer(tokenizer, [60_000], types_pb2.FINISH_REASON_LENGTH, logprobs=True, return_token_ids=True)
    assert choice["message"]["content"] == ""
    assert choice["token_ids"] == [60_000]
    assert choice["logprobs"]["content"] == [{"token": "", "logprob": -0.5, "bytes": (), "top_logprobs": []}]


def test_top_logprobs(tokenizer: Tokenizer) -> None:
    [a] = encoded(tokenizer, "a")
    top: list[Sequence[tuple[int, float]]] = [[(a, -0.25), (IM_END, -2.0)]]
    choice = answer(tokenizer, [a], types_pb2.FINISH_REASON_LENGTH, top=top, logprobs=True, top_logprobs=2)
    [entry] = choice["logprobs"]["content"]
    assert entry["top_logprobs"] == [
        {"token": "a", "logprob": -0.25, "bytes": (97,)},
        {"token": "<|im_end|>", "logprob": -2.0, "bytes": tuple(b"<|im_end|>")},
    ]


def test_what_is_ruled_out_has_a_finite_logprob(tokenizer: Tokenizer) -> None:
    [a], b = encoded(tokenizer, "a"), IM_END
    never = float("-inf")
    choice = answer(tokenizer, [a], types_pb2.FINISH_REASON_LENGTH, top=[[(b, never)]], logprobs=True, top_logprobs=1)
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
    top = TopLogprobs(k=1, token_ids=[b], logprobs=[never])
    started = GenerateResponse.Started(prompt_logprobs=[never], prompt_top_logprobs=top)
    told = prompt_logprobs(tokenizer, [a, b], started, 1)[1]
    assert told is not None
    assert told[str(b)]["logprob"] == -9999.0
    writer = ColumnWriter(tokenizer, as_ids=True, skip_special_tokens=False, top=1, offset=0)
    columns = writer.write([a, b], [None, never], [[], [(b, never)]])
    assert columns["token_logprobs"] == [None, -9999.0]
    assert columns["top_logprobs"] == [None, {f"token_id:{b}": -9999.0}]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (types_pb2.FINISH_REASON_STOP, "stop"),
        (types_pb2.FINISH_REASON_LENGTH, "length"),
        (types_pb2.FINISH_REASON_ABORT, "abort"),
        (types_pb2.FINISH_REASON_REPETITION, "repetition"),
    ],
)
def test_finish_reasons(tokenizer: Tokenizer, reason: types_pb2.FinishReason.ValueType, word: str) -> None:
    assert answer(tokenizer, [34], reason)["finish_reason"] == word


@pytest.mark.parametrize("field", ["return_token_ids", "return_tokens_as_token_ids"])
def test_either_wish_brings_the_ids(tokenizer: Tokenizer, field: str) -> None:
    wish: dict[str, Any] = {field: True}
    message = answer(tokenizer, [34, IM_END], **wish)["message"]
    assert message == {
        "role": "assistant",
        "content": "2",
        "prompt_token_ids": PROMPT,
        "generation_token_ids": [34, IM_END],
        "generation_log_probs": [-0.5, -0.5],
    }
