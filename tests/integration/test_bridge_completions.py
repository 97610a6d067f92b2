"""Plain completions through a real bridge process; the engine's answer is one text, whatever it is asked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.answering import AnsweringSidecar
from support.completions import PATH, PEPPER, PROMPT, TEXT, VOCABULARY, Json, bridge, complete, sidecar

if TYPE_CHECKING:
    from integration.conftest import Bridge

__all__ = ["bridge", "sidecar"]

COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def prompt_ids(bridge: Bridge) -> list[int]:
    return bridge.client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]


def refusal(bridge: Bridge, prompt: Any = PROMPT, **fields: Any) -> Json:
    # By the standard library, which writes half a surrogate pair as well.
    body = json.dumps({"prompt": prompt, **fields})
    response = bridge.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def streamed(bridge: Bridge, prompt: Any = PROMPT, **fields: Any) -> list[Json]:
    """The chunks of a streamed answer, which must end well."""
    response = bridge.client.post(PATH, json={"prompt": prompt, "stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *frames, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def folded(chunks: list[Json]) -> list[Json]:
    """The choices that chunks add up to."""
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None})
            whole["text"] += choice["text"]
            if (columns := choice["logprobs"]) is not None:
                whole["logprobs"] = {n: (whole["logprobs"] or {}).get(n, []) + columns[n] for n in COLUMNS}
            if "token_ids" in choice:
                whole["token_ids"] = whole.get("token_ids", []) + choice["token_ids"]
            for name in ("prompt_token_ids", "prompt_logprobs"):
                if name in choice:
                    assert name not in whole
                    whole[name] = choice[name]
            if choice["finish_reason"] is not None:
                assert "finish_reason" not in whole
                whole |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
    return [choices[index] for index in sorted(choices)]


def test_the_answer_is_the_legacy_object(bridge: Bridge, sidecar: AnsweringSidecar, prompt_ids: list[int]) -> None:
    body = complete(bridge)
    call_id = sidecar.calls[-1].call_id
    assert body == {
        "id": f"cmpl-{call_id}",
        "object": "text_completion",
        "created": body["created"],
        "model": "toy",
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(sidecar.engine.answer),
            "total_tokens": len(prompt_ids) + len(sidecar.engine.answer),
        },
        "tokentape": {"tape_id": None, "call_ids": [call_id]},
    }


def test_text_and_ids_are_the_same_prompt(bridge: Bridge, sidecar: AnsweringSidecar, prompt_ids: list[int]) -> None:
    for prompt in (PROMPT, [PROMPT], prompt_ids, [prompt_ids]):
        complete(bridge, prompt)
        assert list(sidecar.calls[-1].prompt_token_ids) == prompt_ids


def test_choices_of_several_prompts_stand_in_their_order(bridge: Bridge, prompt_ids: list[int]) -> None:
    prompts = [prompt_ids, [5], [6, 7]]
    body = complete(bridge, prompts, n=2, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [p for p in prompts for _ in range(2)]
    sampled = sum(len(choice["token_ids"]) for choice in body["choices"])
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (len(prompt_ids) + 3, sampled)
    assert len(set(body["tokentape"]["call_ids"])) == 3


def test_columns_run_in_parallel_and_offsets_point_into_the_text(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    [choice] = complete(bridge, logprobs=2)["choices"]
    columns = choice["logprobs"]
    assert {len(columns[name]) for name in COLUMNS} == {len(sidecar.engine.answer)}
    assert set(columns["token_logprobs"]) == {-0.5}
    for token, offset, top in zip(columns["tokens"], columns["text_offset"], columns["top_logprobs"], strict=True):
        # Two best ones, and the sampled one, which is none of them.
        assert len(top) == 3
        assert top[token] == -0.5
        if not token.startswith("bytes:") and token != "<|im_end|>":
            assert choice["text"].startswith(token, offset)
    parts = [token for token in columns["tokens"] if token.startswith("bytes:")]
    spelled = bytes.fromhex("".join(part.removeprefix("bytes:").replace("\\x", "") for part in parts))
    assert PEPPER.encode() in spelled or spelled in PEPPER.encode()
    assert parts


def test_tokens_can_be_told_by_id(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    [choice] = complete(bridge, logprobs=0, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in sidecar.engine.answer]
    assert choice["logprobs"]["top_logprobs"] == [{f"token_id:{i}": -0.5} for i in sidecar.engine.answer]
    assert choice["token_ids"] == sidecar.engine.answer


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_begins_with_the_prompt(bridge: Bridge, prompt_ids: list[int], as_ids: bool) -> None:
    [choice] = complete(bridge, prompt_ids if as_ids else PROMPT, echo=True, logprobs=1)["choices"]
    assert choice["text"] == PROMPT + TEXT
    columns = choice["logprobs"]
    count = len(prompt_ids)
    assert columns["tokens"][:count] == ["Once", " upon"]
    assert columns["token_logprobs"][:count] == [None, -0.5]
    assert columns["top_logprobs"][0] is None
    assert len(columns["top_logprobs"][1]) == 2
    assert columns["text_offset"][: count + 1] == [0, len("Once"), len(PROMPT)]


def test_echo_without_logprobs_asks_the_engine_for_none(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    [choice] = complete(bridge, echo=True)["choices"]
    assert (choice["text"], choice["logprobs"]) == (PROMPT + TEXT, None)
    assert sidecar.calls[-1].sampling.prompt_logprobs is None


def test_prompt_logprobs_have_null_first_and_come_once_A13(bridge: Bridge) -> None:
    prompt = [9707, 11, 1879, 0, 220]
    for choices in (
        complete(bridge, prompt, prompt_logprobs=1)["choices"],
        folded(streamed(bridge, prompt, prompt_logprobs=1)),
    ):
        [choice] = choices
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert [entry[str(i)]["logprob"] for i, entry in zip(prompt[1:], rest, strict=True)] == [-0.5] * 4
        assert all(entry["5"]["rank"] == 1 for entry in rest)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"echo": True},
        {"echo": True, "logprobs": 1, "n": 2},
        {"n": 2, "return_token_ids": True, "prompt_logprobs": 0},
        {"prompt": [[5], [6, 7]], "n": 2, "logprobs": 0, "return_tokens_as_token_ids": True},
        {"prompt": ["Once", "upon"], "max_tokens": 3, "echo": True},
        {"stop": [" there"], "logprobs": 1},
        {"skip_special_tokens": False, "logprobs": 0},
    ],
    ids=str,
)
def test_a_stream_adds_up_to_the_whole(bridge: Bridge, fields: Json) -> None:
    assert folded(streamed(bridge, **fields)) == complete(bridge, **fields)["choices"]


def test_a_stream_ends_with_its_usage(bridge: Bridge) -> None:
    fields: Json = {"prompt": ["Once", "upon"], "n": 2}
    *chunks, last = streamed(bridge, stream_options={"include_usage": True}, **fields)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], complete(bridge, **fields)["usage"])
    assert len(chunks[0]["tokentape"]["call_ids"]) == 2
    assert all("tokentape" not in chunk for chunk in chunks[1:])


def test_a_stop_string_is_cut_from_the_text_alone(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    # This engine goes on; what counts is what reaches it.
    complete(bridge, stop=" there", min_tokens=1)
    assert sidecar.calls[-1].sampling.stop == (" there",)


@pytest.mark.parametrize(
    ("max_tokens", "granted"), [(1, 1), (4, 4), (5, 4), (10_000, 4), (None, 4)], ids=["1", "4", "5", "10000", "null"]
)
def test_the_limit_is_clamped_to_the_room_A11(
    bridge: Bridge, sidecar: AnsweringSidecar, max_tokens: int | None, granted: int
) -> None:
    [choice] = complete(bridge, [5] * 60, max_tokens=max_tokens, return_token_ids=True)["choices"]
    assert sidecar.calls[-1].sampling.max_tokens == granted
    assert len(choice["token_ids"]) == granted
    assert choice["finish_reason"] == "length"


def test_the_limit_is_16_where_none_is_given(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    complete(bridge)
    assert sidecar.calls[-1].sampling.max_tokens == 16


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_a_limit_below_one_is_refused_A11(bridge: Bridge, max_tokens: int) -> None:
    assert refusal(bridge, max_tokens=max_tokens)["param"] == "max_tokens"


@pytest.mark.parametrize("count", [64, 65])
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_context_says_so_with_both_numbers_A11(bridge: Bridge, count: int, stream: bool) -> None:
    error = refusal(bridge, [5] * count, stream=stream)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "maximum context length" in error["message"]
    assert "64" in error["message"]
    assert str(count) in error["message"]
    assert "-" not in error["message"].replace("max-", "")


WRONG: list[tuple[Any, Json, str]] = [
    ([1, -1], {}, "prompt.1"),
    ([1, 4294967296], {}, "prompt.1"),
    ([[5], [6, VOCABULARY]], {}, "prompt.1.1"),
    ([5], {"stop_token_ids": [VOCABULARY + 5]}, "stop_token_ids"),
    ([5], {"logit_bias": {str(VOCABULARY + 5): 1}}, "logit_bias"),
    ([5], {"n": 0}, "n"),
    ("", {}, "prompt"),
    ([], {}, "prompt"),
    ([[]], {}, "prompt"),
    ([[5], []], {}, "prompt"),
    (["a", ""], {}, "prompt.1"),
    ([5, "a"], {}, "prompt"),
    ([True], {}, "prompt"),
    ({"text": "a"}, {}, "prompt"),
    (None, {}, "prompt"),
    ("a\ud800", {}, "prompt"),
    ([5], {"logprobs": 21}, "logprobs"),
    ([5], {"logprobs": -1}, "logprobs"),
    ([5], {"prompt_logprobs": 21}, "prompt_logprobs"),
    ([5], {"stream_options": {"include_usage": True}}, "stream_options"),
    ([5], {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ([5], {"structured_outputs": {}}, "structured_outputs"),
    ([5], {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
]


@pytest.mark.parametrize(("prompt", "fields", "param"), WRONG)
def test_what_is_wrong_is_named_and_the_next_is_served_A10_A13(
    bridge: Bridge, prompt: Any, fields: Json, param: str
) -> None:
    assert refusal(bridge, prompt, **fields)["param"] == param
    assert complete(bridge)["choices"][0]["text"] == TEXT


def test_too_many_prompts_are_refused(bridge: Bridge) -> None:
    assert refusal(bridge, [[5]] * 2049)["param"] == "prompt"
