"""Cases from the field about ids, /tokenize and /detokenize, over HTTP, with Qwen3's tokenizer and template."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from support.answering import OTHER_TOKENS_SEED, AnsweringSidecar
from support.qwen_bridge import (
    CHAT,
    END,
    QUESTION,
    RESULT,
    TOOLS,
    VOCABULARY,
    Json,
    ask,
    bridge,
    calling,
    prompt_of,
    refusal,
    says_hi,
    sidecar,
    text_of,
)
from tokentape_sidecar.errors import NotFound

if TYPE_CHECKING:
    from integration.conftest import Bridge

__all__ = ["bridge", "says_hi", "sidecar"]

PADDING = 151672
"""An id that the model has and the tokenizer has not."""

SHAPES: list[Json] = [
    {},
    {"tools": TOOLS},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}, "required_prefix_token_ids": [1, 2, 3]},
    {"add_generation_prompt": False},
    {"reasoning_effort": "low"},
]


@pytest.mark.parametrize("fields", SHAPES, ids=str)
def test_tokenize_is_the_chats_prompt_B13(bridge: Bridge, sidecar: AnsweringSidecar, fields: Json) -> None:
    prompt = prompt_of(bridge, sidecar, [QUESTION, calling(""), RESULT], **fields)
    text = text_of(bridge, prompt)
    # Qwen3's template renders what it was given, and detokenizing gives that back.
    assert text.startswith("<|im_start|>")
    assert ("<tools>" in text) == ("tools" in fields)
    assert bridge.client.post("/tokenize", json={"prompt": text}).json()["tokens"] == prompt


def test_tokenize_on_a_tape_is_the_continued_prompt_B13(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    tape = sidecar.run(sidecar.client.open_tape())
    fields: Json = {"metadata": {"tape_id": tape.tape_id}}
    sidecar.engine.say("Hello.")
    seeds = (None, OTHER_TOKENS_SEED)
    answers = [ask(bridge, return_token_ids=True, seed=seed, **fields) for seed in seeds]
    asked = answers[0]["prompt_token_ids"]
    completions = [answer["choices"][0]["token_ids"] for answer in answers]
    assert completions[0] != completions[1]
    history = [QUESTION, {"role": "assistant", "content": "Hello."}, QUESTION]
    for completion in completions:
        prefix = asked + completion
        prompt = prompt_of(bridge, sidecar, history, required_prefix_token_ids=prefix, **fields)
        assert prompt[: len(prefix)] == prefix
    under = bridge.client.post(f"/tapes/{tape.tape_id}/tokenize", json={"messages": history})
    assert under.json()["tokens"][: len(asked) + 1] == [*asked, completions[1][0]]


def test_tokens_have_their_own_texts(bridge: Bridge) -> None:
    body = {"prompt": "Hi there<|im_end|>", "return_token_strs": True}
    answer = bridge.client.post("/tokenize", json=body).json()
    assert answer["token_strs"] == ["Hi", "\u0120there", "<|im_end|>"]


def test_a_final_message_stays_open_B13(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    begun = [QUESTION, {"role": "assistant", "content": "It is <|im_end|> sunny and"}]
    prompt = prompt_of(bridge, sidecar, begun, continue_final_message=True)
    assert text_of(bridge, prompt).endswith("It is <|im_end|> sunny and")
    # What spells a special token is plain text here as everywhere.
    assert prompt.count(END) == prompt_of(bridge, sidecar, [QUESTION], add_generation_prompt=False).count(END)
    [choice] = ask(bridge, begun, continue_final_message=True)["choices"]
    assert choice["message"]["content"] == "Hi."


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([QUESTION], {}),
        ([QUESTION, {"role": "assistant", "content": "Well"}], {"add_generation_prompt": True}),
        ([QUESTION, calling("Well")], {}),
    ],
)
def test_a_final_message_that_cannot_be_continued_is_refused(
    bridge: Bridge, messages: list[Json], fields: Json
) -> None:
    assert refusal(bridge, messages, continue_final_message=True, **fields)["param"] == "continue_final_message"


def test_a_continued_message_begins_a_new_sample(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    tape = sidecar.run(sidecar.client.open_tape())
    fields: Json = {"metadata": {"tape_id": tape.tape_id}}
    ask(bridge, **fields)
    body = ask(bridge, [QUESTION, {"role": "assistant", "content": "Hi."}], continue_final_message=True, **fields)
    assert (body["tokentape"]["prefix"], body["tokentape"]["split_cause"]) == ("new", "history_edited")


@pytest.mark.parametrize("tokens", [[-1], [5, VOCABULARY], [2**32], [2**70]], ids=str)
def test_ids_that_are_none_are_refused_by_detokenize_A10(bridge: Bridge, tokens: list[int]) -> None:
    response = bridge.client.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"tokens.{len(tokens) - 1}"
    assert text_of(bridge, [9707]) == "Hello"


@pytest.mark.parametrize(
    "body", [{}, {"tokens": "a"}, {"tokens": ["a"]}, {"tokens": [True]}, {"tokens": None}], ids=str
)
def test_what_is_no_list_of_ids_is_refused_by_detokenize_A10(bridge: Bridge, body: Json) -> None:
    response = bridge.client.post("/detokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"].partition(".")[0]) == (400, "tokens")


def test_a_sampled_id_of_the_padding_area_has_no_text_A10(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.answer = [9707, PADDING, END]
    fields: Json = {"logprobs": True, "return_token_ids": True}
    [choice] = ask(bridge, **fields)["choices"]
    assert choice["token_ids"] == [9707, PADDING, END]
    assert choice["message"]["content"] == "Hello"
    entry = choice["logprobs"]["content"][1]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("", -0.5, [])
    response: httpx.Response = bridge.client.post(CHAT, json={"messages": [QUESTION], "stream": True, **fields})
    assert response.text.rstrip().endswith("data: [DONE]")
    assert f"{PADDING}" in response.text
    assert text_of(bridge, [9707, PADDING]) == "Hello"


def test_choices_are_counted_together_and_the_prompt_once_A13(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    body = ask(bridge, n=2, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["token_ids"] for choice in body["choices"]] == [sidecar.engine.answer] * 2
    assert body["usage"]["completion_tokens"] == 2 * len(sidecar.engine.answer)
    assert body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"])


def test_an_unknown_adapter_is_an_unknown_model(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    # As a sidecar says it that has come back without the adapter, before the bridge has noticed.
    sidecar.engine.refusal = NotFound("lora_name: no LoRA adapter 'x' is loaded; there are: none")
    try:
        response = bridge.client.post(CHAT, json={"messages": [QUESTION], "model": "toy"})
    finally:
        sidecar.engine.refusal = None
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
