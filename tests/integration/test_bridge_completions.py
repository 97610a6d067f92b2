"""Plain completions through a real bridge process; the engine's answer is one text, whatever it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from support.answering import AnsweringEngine, AnsweringSidecar, answering_sidecar
from support.sidecar_client import OpenedTape, SidecarClient, prompts_on
from support.tokenizers import KINDS, TokenizerDirectory
from tokentape.v1 import types_pb2

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

Json = dict[str, Any]

PATH = "/v1/completions"
END = KINDS["qwen3"].stop_token_ids[0]
VOCABULARY = 151936
PEPPER = "\N{HOT PEPPER}"
TEXT = f"H\u00e9 {PEPPER} there, so."
PROMPT = "Once upon"
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def sidecar(tokenizer_directory: TokenizerDirectory) -> Iterator[AnsweringSidecar]:
    engine = AnsweringEngine(
        tokenizer_directory("qwen3"),
        TEXT,
        end=END,
        vocabulary_size=VOCABULARY,
        max_context_tokens=64,
        lora_names=("math",),
    )
    with answering_sidecar(engine, "a") as running:
        yield running


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, sidecar: AnsweringSidecar) -> Bridge:
    return start_bridge(a=sidecar.address).wait_healthy()


@pytest.fixture(scope="module")
def prompt_ids(bridge: Bridge) -> list[int]:
    return bridge.client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]


def complete(bridge: Bridge, prompt: Any = PROMPT, **fields: Any) -> Json:
    response = bridge.client.post(PATH, json={"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return response.json()


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


@pytest.mark.parametrize("where", ["path", "metadata", "header", "user"])
async def test_each_prompt_is_a_call_of_the_tape(bridge: Bridge, sidecar: AnsweringSidecar, where: str) -> None:
    tape = sidecar.run(sidecar.client.open_tape())
    prefix, headers, fields = "", {}, dict[str, Any]()
    match where:
        case "path":
            prefix = f"/tapes/{tape.tape_id}"
        case "metadata":
            fields = {"metadata": {"tape_id": tape.tape_id}}
        case "header":
            headers = {"x-tape-id": tape.tape_id}
        case _:
            fields = {"user": tape.tape_id}
    response = bridge.client.post(f"{prefix}{PATH}", json={"prompt": [[5], [6, 7]], **fields}, headers=headers)
    call_ids = response.json()["tokentape"]["call_ids"]
    assert response.headers["x-tape-id"] == tape.tape_id
    assert response.headers["x-call-ids"] == ", ".join(call_ids)
    entries = sidecar.run(sidecar.client.entries(tape))
    prompts = prompts_on(entries)
    assert [prompts[call_id] for call_id in call_ids] == [[5], [6, 7]]
    [*causes] = [it.call_started.split_cause for it in entries if it.HasField("call_started")]
    assert causes == [types_pb2.SPLIT_CAUSE_NEW_CONVERSATION] * 2


def test_ids_of_many_calls_are_no_header(bridge: Bridge) -> None:
    response = bridge.client.post(PATH, json={"prompt": [[5]] * 200})
    assert len(response.json()["tokentape"]["call_ids"]) == 200
    assert "x-call-ids" not in response.headers


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_any_number_of_choices_is_refused_at_once(bridge: Bridge, path: str) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "n": 2**32 - 1}
    response = bridge.client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_an_adapter_is_a_model_of_its_own_name(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    assert complete(bridge, model="math")["model"] == "math"
    assert sidecar.calls[-1].lora_name == "math"
    assert complete(bridge, model="toy")["model"] == "toy"
    assert sidecar.calls[-1].lora_name == ""
    assert bridge.client.post(PATH, json={"prompt": "a", "model": "toy:math"}).status_code == 404


def test_the_openai_client_completes(bridge: Bridge) -> None:
    with openai.OpenAI(base_url=f"{bridge.client.base_url}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(model="toy", prompt=[PROMPT, "And"], n=2, logprobs=1, echo=True)
        assert [choice.text for choice in whole.choices] == [PROMPT + TEXT] * 2 + ["And" + TEXT] * 2
        chunks = list(client.completions.create(model="toy", prompt=PROMPT, stream=True))
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == TEXT
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="toy", prompt=PROMPT, suffix="x")
        assert caught.value.param == "suffix"


SLOW: Json = {"steps": [{"token_ids": [9707]}, {"token_ids": [END], "delay_ms": 30_000, "finish_reason": "stop"}]}
MODEL: Json = {"name": "toy", "max_model_len": 64, "vocab_size": VOCABULARY, "eos_token_ids": [END]}
BROKEN: Json = {"steps": [{"token_ids": [9707]}, {"error": "out of luck", "delay_ms": 300}]}


async def test_a_client_that_leaves_ends_the_calls_of_all_prompts(
    start_bridge: StartBridge, start_sidecar: StartSidecar, tokenizer_directory: TokenizerDirectory
) -> None:
    script = {"model": MODEL, "calls": [SLOW, SLOW]}
    process = start_sidecar(script, tokenizer=tokenizer_directory("qwen3"))
    bridge = start_bridge(a=process.address).wait_healthy()
    async with SidecarClient(process.address, "a") as sidecar:
        tape = await sidecar.open_tape()
        body: Json = {"prompt": ["a", "b"], "stream": True, "user": tape.tape_id}
        async with (
            httpx.AsyncClient(base_url=bridge.client.base_url, timeout=20) as client,
            client.stream("POST", PATH, json=body) as response,
        ):
            assert response.status_code == 200
            await anext(response.aiter_lines())
        ends: list[int] = []
        async with asyncio.timeout(10):
            while len(ends) < 2:
                await asyncio.sleep(0.05)
                ends = await endings(sidecar, tape)
    assert ends == [types_pb2.FINISH_REASON_ABORT] * 2


async def endings(sidecar: SidecarClient, tape: OpenedTape) -> list[int]:
    """Why the choices on a tape ended."""
    entries = await sidecar.entries(tape)
    ended = [entry.choice_finished for entry in entries if entry.HasField("choice_finished")]
    return [finished.completion.finish_reason for finished in ended]


@pytest.fixture
def failing(start_bridge: StartBridge, start_sidecar: StartSidecar, tokenizer_directory: TokenizerDirectory) -> Bridge:
    """A bridge whose engine's first call is slow, and whose second fails."""
    script = {"model": MODEL, "calls": [SLOW, BROKEN]}
    sidecar = start_sidecar(script, tokenizer=tokenizer_directory("qwen3"))
    return start_bridge(a=sidecar.address).wait_healthy()


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_that_fails_ends_the_others(failing: Bridge, stream: bool) -> None:
    response: httpx.Response = failing.client.post(PATH, json={"prompt": ["a", "b"], "stream": stream})
    if not stream:
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
        return
    assert response.status_code == 200
    last = response.text.removesuffix("\n\n").split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_error"
