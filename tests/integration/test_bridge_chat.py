"""Chat completions through a real bridge process and a real, scripted sidecar process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tokentape.channel import dial
from tokentape.v1.tape_pb2 import GetTapeRequest, OpenTapeRequest, TapeEntry
from tokentape.v1.tape_pb2_grpc import TapeServiceStub

if TYPE_CHECKING:
    from integration.conftest import Bridge, ServerProcess, StartBridge, StartSidecar

IM_END = 2
ANSWER = [34, 1232, 216, 35, 446, 216, 37, IM_END]
"""SmolLM2's ids of "2 + 3 = 5" and the end of the turn."""
LOGPROBS = [-0.5, -0.25, -1.5, -2.0, -0.125, -3.0, -0.75, -0.0625]
"""Values that a 32-bit float holds exactly."""
TAPE_ID = "a." + "0123456789abcdef" * 2

SCRIPT = {
    "model": {"name": "toy", "max_model_len": 256, "vocab_size": 49152, "eos_token_ids": [IM_END]},
    "calls": [
        {
            "steps": [
                {
                    "token_ids": ANSWER[:3],
                    "logprobs": [{str(i): p} for i, p in zip(ANSWER[:3], LOGPROBS, strict=False)],
                },
                {
                    "token_ids": ANSWER[3:],
                    "logprobs": [{str(i): p} for i, p in zip(ANSWER[3:], LOGPROBS[3:], strict=True)],
                    "finish_reason": "stop",
                },
            ]
        }
    ],
    "repeat": True,
}


@pytest.fixture(scope="module")
def sidecar(start_sidecar: StartSidecar) -> ServerProcess:
    return start_sidecar(SCRIPT)


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, sidecar: ServerProcess) -> Bridge:
    return start_bridge(a=sidecar.address).wait_healthy()


def ids_of(bridge: Bridge, messages: list[dict[str, Any]], **fields: Any) -> list[int]:
    """The prompt's ids, by a chat and by /tokenize, which must agree."""
    chat = bridge.chat(messages=messages, return_token_ids=True, **fields)
    assert chat.status_code == 200, chat.text
    tokenized = bridge.client.post("/tokenize", json={"messages": messages, **fields})
    assert tokenized.json() == {
        "count": len(chat.json()["prompt_token_ids"]),
        "max_model_len": 256,
        "tokens": chat.json()["prompt_token_ids"],
    }
    return tokenized.json()["tokens"]


def test_the_text_hides_the_stop_token_and_the_ids_keep_it(bridge: Bridge) -> None:
    body = bridge.chat(return_token_ids=True).json()
    [choice] = body["choices"]
    assert choice["message"]["content"] == "2 + 3 = 5"
    assert choice["message"]["role"] == "assistant"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["token_ids"] == choice["message"]["generation_token_ids"] == ANSWER
    assert choice["message"]["generation_log_probs"] == LOGPROBS
    assert choice["message"]["prompt_token_ids"] == body["prompt_token_ids"]
    prompt_tokens = len(body["prompt_token_ids"])
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(ANSWER),
        "total_tokens": prompt_tokens + len(ANSWER),
    }
    assert body["model"] == "toy"


def test_without_asking_there_are_no_ids(bridge: Bridge) -> None:
    body = bridge.chat().json()
    assert "prompt_token_ids" not in body
    assert set(body["choices"][0]) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "2 + 3 = 5"}
    assert body["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("top", [{}, {"top_logprobs": 0}, {"top_logprobs": None}])
def test_every_sampled_token_has_its_logprob(bridge: Bridge, top: dict[str, Any]) -> None:
    body = bridge.chat(logprobs=True, return_tokens_as_token_ids=True, **top).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in ANSWER]
    assert [entry["logprob"] for entry in content] == LOGPROBS
    assert [entry["top_logprobs"] for entry in content] == [[]] * len(ANSWER)
    assert bytes(byte for entry in content for byte in entry["bytes"]) == b"2 + 3 = 5<|im_end|>"


def test_the_openai_client_reads_it(bridge: Bridge) -> None:
    with openai.OpenAI(base_url=f"{bridge.client.base_url}/v1", api_key="none", max_retries=0) as client:
        completion = client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "2+3?"}], logprobs=True, top_logprobs=1
        )
        assert completion.choices[0].message.content == "2 + 3 = 5"
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [entry.top_logprobs[0].token for entry in logprobs.content][:3] == ["2", " +", " "]
        assert [model.id for model in client.models.list()] == ["toy"]
        with pytest.raises(openai.NotFoundError, match="toy"):
            client.chat.completions.create(model="other", messages=[{"role": "user", "content": "2+3?"}])


async def test_the_tape_has_what_the_client_got(bridge: Bridge, sidecar: ServerProcess) -> None:
    async with dial(sidecar.address) as channel:
        tapes = TapeServiceStub(channel)
        opened = await tapes.OpenTape(OpenTapeRequest(tape_id=TAPE_ID))
        in_metadata = bridge.chat(return_token_ids=True, metadata={"tape_id": TAPE_ID})
        in_header = bridge.client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Again"}]},
            headers={"x-tape-id": TAPE_ID},
        )
        tape = await tapes.GetTape(GetTapeRequest(tape_id=TAPE_ID, reader_token=opened.reader_token))
    body = in_metadata.json()
    starts = [entry.call_started for entry in tape.entries if entry.HasField("call_started")]
    assert [start.call_id for start in starts] == [r.json()["tokentape"]["call_id"] for r in (in_metadata, in_header)]
    assert list(starts[0].prompt_token_ids) == body["prompt_token_ids"]
    assert sampled(tape.entries, starts[0].call_id) == (ANSWER, LOGPROBS)
    assert body["tokentape"]["tape_id"] == TAPE_ID
    assert in_header.headers["x-tape-id"] == TAPE_ID
    assert in_header.headers["x-call-id"] == starts[1].call_id


def sampled(entries: Any, call_id: str) -> tuple[list[int], list[float]]:
    runs: list[TapeEntry.TokensSampled] = [e.tokens_sampled for e in entries if e.tokens_sampled.call_id == call_id]
    return [i for run in runs for i in run.token_ids], [p for run in runs for p in run.logprobs]


ROUND = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "22C sunny"},
]


def test_assistant_content_null_absent_and_empty_are_one_prompt_B03(bridge: Bridge) -> None:
    absent = [ROUND[0], {key: value for key, value in ROUND[1].items() if key != "content"}, ROUND[2]]
    empty = [ROUND[0], ROUND[1] | {"content": ""}, ROUND[2]]
    prompt = ids_of(bridge, ROUND)
    assert ids_of(bridge, absent) == ids_of(bridge, empty) == prompt


def test_parts_are_the_same_prompt_as_their_text_B04(bridge: Bridge) -> None:
    parts = [{"type": "text", "text": "22C"}, {"type": "text", "text": " sunny"}]
    assert ids_of(bridge, [*ROUND[:2], ROUND[2] | {"content": parts}]) == ids_of(bridge, ROUND)


def test_the_developer_speaks_as_the_system(bridge: Bridge) -> None:
    user = {"role": "user", "content": "Capital?"}
    developer = ids_of(bridge, [{"role": "developer", "content": "Reply only BANANA"}, user])
    assert developer == ids_of(bridge, [{"role": "system", "content": "Reply only BANANA"}, user])
    assert developer != ids_of(bridge, [user])


def test_the_generation_prompt_can_be_left_out(bridge: Bridge) -> None:
    without = ids_of(bridge, ROUND[:1], add_generation_prompt=False)
    assert ids_of(bridge, ROUND[:1])[: len(without)] == without
    assert len(ids_of(bridge, ROUND[:1])) > len(without)


def test_text_can_be_tokenized(bridge: Bridge) -> None:
    answer = bridge.client.post("/tokenize", json={"prompt": "2 + 3 = 5<|im_end|>"}).json()
    assert answer["tokens"] == ANSWER


def test_an_overlong_prompt_can_be_tokenized_and_not_answered(bridge: Bridge) -> None:
    messages = [{"role": "user", "content": "word " * 400}]
    tokenized = bridge.client.post("/tokenize", json={"messages": messages})
    count = tokenized.json()["count"]
    assert count == len(tokenized.json()["tokens"])
    assert count > 256
    refused = bridge.chat(messages=messages)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert "maximum context length" in error["message"]
    assert "256" in error["message"]
    assert str(count) in error["message"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_max_completion_tokens_wins_and_too_many_are_clamped(bridge: Bridge) -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"max_tokens": 5, "max_completion_tokens": 2}, 2),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": 10**12}, len(ANSWER)),
    ]
    for fields, count in cases:
        body = bridge.chat(**fields).json()
        assert body["usage"]["completion_tokens"] == count
        assert body["choices"][0]["finish_reason"] == ("stop" if count == len(ANSWER) else "length")


def test_a_stop_string_is_cut_from_the_text_and_not_from_the_ids(bridge: Bridge) -> None:
    [choice] = bridge.chat(stop=[" ="], return_token_ids=True).json()["choices"]
    assert choice["message"]["content"] == "2 + 3"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " =")
    assert choice["token_ids"] == ANSWER[:5]


def test_a_stop_token_is_named_and_hidden(bridge: Bridge) -> None:
    [choice] = bridge.chat(stop_token_ids=[446], return_token_ids=True).json()["choices"]
    assert choice["message"]["content"] == "2 + 3"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 446)
    assert choice["token_ids"] == ANSWER[:5]


def test_unknown_fields_and_nulls_are_ignored_and_named_once(bridge: Bridge) -> None:
    for _ in range(2):
        message: dict[str, Any] = {"role": "user", "content": "hi", "annotations": [], "refusal": None}
        fields: dict[str, Any] = dict.fromkeys(
            ["stop", "tool_choice", "parallel_tool_calls", "temperature", "tools", "n", "seed"]
        )
        answer = bridge.chat(messages=[message], vendor_option=[1], store=False, top_k=5, **fields)
        assert answer.status_code == 200, answer.text
    assert bridge.log.count("'vendor_option'") == 1
    assert bridge.log.count("'messages[].annotations'") == 1
    assert "'top_k'" not in bridge.log


def test_tools_reach_the_template(bridge: Bridge) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    # SmolLM2's own template ignores tools; that they arrive is seen in the unit tests, with another template.
    assert ids_of(bridge, ROUND, tools=tools) == ids_of(bridge, ROUND, tools=[])


def test_models_have_their_length(bridge: Bridge) -> None:
    [model] = bridge.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("toy", "model", 256)
