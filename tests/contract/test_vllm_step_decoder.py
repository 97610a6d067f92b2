"""Messages of vLLM's core, written by vLLM's own encoder: what ours reads is what vLLM's reads."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from typing import Any, cast

import numpy as np
import pytest

with warnings.catch_warnings():
    # Torch's own and vLLM's, on import.
    warnings.simplefilter("ignore")
    import torch
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason, UtilityOutput
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

    from tokentape_sidecar.vllm_engine.step_decoder import StepDecoder, sampled_token


# Torch's, of what vLLM's decoder does with a tensor.
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


class Own:
    """Stands for a request's state of the direct path."""


def lists(ids: list[list[int]], dtype: Any = np.int64) -> LogprobsLists:
    rows = np.array(ids, dtype=dtype)
    values = (-rows / 7).astype(np.float32)
    return LogprobsLists(rows, values, np.zeros(len(ids), dtype=np.int64), None)


def output(request_id: str, logprobs: LogprobsLists | None, **more: Any) -> EngineCoreOutput:
    ids = [] if logprobs is None else [int(token_id) for token_id in logprobs.logprob_token_ids[:, 0]]
    return EngineCoreOutput(request_id, ids, logprobs, **more)


PROMPT = LogprobsTensors(
    torch.arange(12, dtype=torch.int32).reshape(4, 3), torch.rand(4, 3), torch.zeros(4, dtype=torch.int32)
)
STEPS: dict[str, EngineCoreOutput] = {
    "one token": output("own", lists([[7]])),
    "one token, 32 bits": output("own", lists([[7]], np.int32)),
    "the last token": output("own", lists([[49_151]]), finish_reason=FinishReason.STOP, stop_reason=2),
    "an id of 40 bits": output("own", lists([[2**40]])),
    "no token": output("own", None, finish_reason=FinishReason.ABORT),
    "no token, and no reason either": output("own", None),
    "most probable ones": output("own", lists([[7, 8, 9]])),
    "several tokens": output("own", lists([[7], [8], [9]])),
    "arrays in frames of their own": output("own", lists([list(range(100))])),
    "the prompt's": output("own", lists([[7, 8, 9]]), new_prompt_logprobs_tensors=PROMPT),
    "a slice": output("own", lists([[5], [6], [7]]).slice_request(1, 1)),
}


@pytest.fixture
def vllms() -> MsgpackDecoder:
    return MsgpackDecoder(EngineCoreOutputs)


@pytest.fixture
def ours() -> Generator[MsgpackDecoder]:
    decoder = MsgpackDecoder(EngineCoreOutputs)
    ours = StepDecoder(decoder, {"own": Own(), "other": object()}, Own)
    yield decoder
    ours.close()


def as_lists(logprobs: Any) -> Any:
    """What a reader sees of log-probabilities, in plain types."""
    if type(logprobs) is tuple:
        return [[logprobs[0]]], [[logprobs[1]]]
    return logprobs and (logprobs.logprob_token_ids.tolist(), logprobs.logprobs.tolist())


def told(one: EngineCoreOutput) -> dict[str, Any]:
    fields = {name: getattr(one, name) for name in EngineCoreOutput.__struct_fields__}
    prompt = fields["new_prompt_logprobs_tensors"]
    fields["new_prompt_logprobs_tensors"] = prompt and [column.tolist() for column in prompt[:3]]
    return fields | {"new_logprobs": as_lists(one.new_logprobs), "finished": one.finished}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_a_step_says_what_vllms_decoder_reads(
    vllms: MsgpackDecoder, ours: MsgpackDecoder, step: EngineCoreOutput
) -> None:
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[step], timestamp=1.5, weight_version="v1"))
    expected, decoded = vllms.decode(frames), ours.decode(frames)
    assert [told(one) for one in decoded.outputs] == [told(one) for one in expected.outputs]
    assert (decoded.timestamp, decoded.weight_version) == (1.5, "v1")


@pytest.mark.parametrize("name", ["one token", "one token, 32 bits", "the last token", "an id of 40 bits", "a slice"])
def test_one_token_of_our_request_is_no_array(ours: MsgpackDecoder, name: str) -> None:
    (decoded,) = ours.decode(MsgpackEncoder().encode(EngineCoreOutputs(outputs=[STEPS[name]]))).outputs
    given: Any = STEPS[name].new_logprobs
    assert type(decoded.new_logprobs) is tuple
    assert decoded.new_logprobs == (given.logprob_token_ids[0, 0], given.logprobs[0, 0])


@pytest.mark.parametrize("request_id", ["other", "unknown"])
def test_requests_of_others_get_vllms_own_types(ours: MsgpackDecoder, request_id: str) -> None:
    step = [output("own", lists([[7]])), output(request_id, lists([[8]])), output("own", lists([[9]]))]
    first, other, last = ours.decode(MsgpackEncoder().encode(EngineCoreOutputs(outputs=step))).outputs
    assert isinstance(other.new_logprobs, LogprobsLists)
    assert isinstance(other.new_logprobs.logprobs, np.ndarray)
    assert as_lists(other.new_logprobs) == as_lists(lists([[8]]))
    assert (first.new_logprobs[0], last.new_logprobs[0]) == (7, 9)


def test_a_nan_stays_one(ours: MsgpackDecoder) -> None:
    given = lists([[7]])._replace(logprobs=np.array([[np.nan]], dtype=np.float32))
    (decoded,) = ours.decode(MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output("own", given)]))).outputs
    assert np.isnan(decoded.new_logprobs[1])


def test_other_messages_are_vllms(ours: MsgpackDecoder, vllms: MsgpackDecoder) -> None:
    answer = EngineCoreOutputs(utility_output=UtilityOutput(3, None, UtilityResult([1, "two"])))
    frames = MsgpackEncoder().encode(answer)
    decoded, expected = ours.decode(frames), vllms.decode(frames)
    assert decoded.utility_output.result.result == expected.utility_output.result.result == [1, "two"]
    assert decoded.outputs == []


def test_closed_it_leaves_the_decoder_as_it_was() -> None:
    decoder = MsgpackDecoder(EngineCoreOutputs)
    StepDecoder(decoder, {"own": Own()}, Own).close()
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[STEPS["one token"]]))
    assert isinstance(decoder.decode(frames).outputs[0].new_logprobs, LogprobsLists)
    assert "decode" not in vars(decoder)


@pytest.fixture
def encoded() -> bytes:
    return cast("bytes", MsgpackEncoder().encode(lists([[7]]))[0])


def test_bytes_of_another_layout_are_left_to_vllm(encoded: bytes) -> None:
    assert sampled_token(encoded) == (7, pytest.approx(-1.0))
    assert sampled_token(b"\x95" + encoded[1:]) is None
    assert sampled_token(encoded.replace(b"<f4", b"<f2")) is None
    assert sampled_token(b"\xc0") is None


@pytest.mark.parametrize("cut", range(1, 33, 4))
def test_bytes_that_end_early_are_left_to_vllm(encoded: bytes, cut: int) -> None:
    assert sampled_token(encoded[:cut]) is None
