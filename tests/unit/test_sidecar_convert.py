"""Between protobuf and the domain nothing is lost, and absent stays absent."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from tokentape.v1 import generation_pb2, tape_pb2, types_pb2
from tokentape_sidecar import convert
from tokentape_sidecar.call_request import CallReference, CallRequest
from tokentape_sidecar.choice_record import Completion
from tokentape_sidecar.engine import FinishReason, LogprobsMode, Sampling
from tokentape_sidecar.errors import InvalidArgument
from tokentape_sidecar.origin import Origin, SplitCause
from tokentape_sidecar.tape import TapeLimits

ALL_FIELDS = types_pb2.SamplingParameters(
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    min_p=0.125,
    presence_penalty=-1.5,
    frequency_penalty=1.5,
    repetition_penalty=1.25,
    max_tokens=11,
    min_tokens=3,
    n=2,
    seed=-5,
    stop=["a", "b"],
    stop_token_ids=[8, 9],
    ignore_eos=True,
    logit_bias={4: -2.5},
    bad_words=["c"],
    allowed_token_ids=[1, 2],
    top_logprobs=6,
    prompt_logprobs=0,
    structured_output=types_pb2.StructuredOutput(regex="[ab]"),
)


def test_every_sampling_parameter_survives_the_way_in_and_out() -> None:
    given = {field.name for field, _ in ALL_FIELDS.ListFields()}
    assert given == {field.name for field in types_pb2.SamplingParameters.DESCRIPTOR.fields}
    assert convert.sampling_to_proto(convert.sampling_from_proto(ALL_FIELDS)) == ALL_FIELDS


def test_absent_sampling_parameters_stay_absent() -> None:
    assert convert.sampling_from_proto(types_pb2.SamplingParameters()) == Sampling()
    assert not convert.sampling_to_proto(Sampling()).ListFields()


@pytest.mark.parametrize(
    "name", [f.name for f in types_pb2.SamplingParameters.DESCRIPTOR.fields if f.has_presence and not f.message_type]
)
def test_a_present_zero_is_not_absent(name: str) -> None:
    message = types_pb2.SamplingParameters()
    setattr(message, name, False if name == "ignore_eos" else 0)
    assert getattr(convert.sampling_from_proto(message), name) == 0
    assert convert.sampling_to_proto(convert.sampling_from_proto(message)).HasField(name)  # pyright: ignore[reportArgumentType] - one of the field names


@pytest.mark.parametrize(
    "output",
    [
        types_pb2.StructuredOutput(json_schema="{}"),
        types_pb2.StructuredOutput(json_object=True),
        types_pb2.StructuredOutput(regex="a+"),
        types_pb2.StructuredOutput(grammar='root ::= "a"'),
        types_pb2.StructuredOutput(choices=types_pb2.StructuredOutput.Choices(values=["yes", "no"])),
        types_pb2.StructuredOutput(structural_tag="{}"),
    ],
)
def test_every_structured_output_survives(output: types_pb2.StructuredOutput) -> None:
    message = types_pb2.SamplingParameters(structured_output=output)
    assert convert.sampling_to_proto(convert.sampling_from_proto(message)) == message


@pytest.mark.parametrize("output", [types_pb2.StructuredOutput(), types_pb2.StructuredOutput(json_object=False)])
def test_no_form_is_free_text(output: types_pb2.StructuredOutput) -> None:
    message = types_pb2.SamplingParameters(structured_output=output)
    assert convert.sampling_from_proto(message) == Sampling()


def test_a_whole_call_request_is_read() -> None:
    request = convert.call_request_from_proto(
        generation_pb2.GenerateRequest(
            prompt_token_ids=[1, 2],
            parent=types_pb2.CallReference(call_id="call-1", choice=1, offset=0),
            anchor="a",
            context_fingerprint="f",
            split_cause=types_pb2.SPLIT_CAUSE_HISTORY_EDITED,
            priority=-3,
            lora_name="l",
            cache_salt="s",
        )
    )
    assert list(request.prompt_token_ids) == [1, 2]
    assert request.parent == CallReference("call-1", 1, 0)
    assert request.origin == Origin("a", "f", SplitCause.HISTORY_EDITED)
    assert (request.priority, request.lora_name, request.cache_salt) == (-3, "l", "s")
    assert request.sampling == Sampling()


def test_an_absent_parent_and_an_absent_offset_stay_absent() -> None:
    alone = convert.call_request_from_proto(generation_pb2.GenerateRequest())
    assert alone == CallRequest(alone.prompt_token_ids)
    child = generation_pb2.GenerateRequest(parent=types_pb2.CallReference(call_id="call-1"))
    assert convert.call_request_from_proto(child).parent == CallReference("call-1", 0, None)


def test_limits_are_read_and_absent_ones_stay_absent() -> None:
    assert convert.limits_from_proto(tape_pb2.TapeLimits()) == TapeLimits()
    message = tape_pb2.TapeLimits(
        max_context_tokens=1, max_sampled_tokens=2, max_calls=3, time_to_live=Duration(seconds=4, nanos=500_000_000)
    )
    assert convert.limits_from_proto(message) == TapeLimits(1, 2, 3, 4.5)
    assert convert.limits_from_proto(tape_pb2.TapeLimits(max_calls=0)).max_calls == 0


def test_a_duration_that_no_calendar_holds_is_read_as_it_stands() -> None:
    limits = tape_pb2.TapeLimits(time_to_live=Duration(seconds=-(2**62)))
    assert convert.limits_from_proto(limits).time_to_live_seconds == -(2.0**62)


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_has_its_number(reason: FinishReason) -> None:
    message = convert.completion_to_proto(Completion(1, reason, None, 3))
    assert message == types_pb2.Completion(
        choice=1, finish_reason=types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}"), token_count=3
    )
    assert message.WhichOneof("stop_reason") is None


def test_a_stop_reason_is_an_id_or_a_string() -> None:
    by_id = convert.completion_to_proto(Completion(0, FinishReason.STOP, 0, 1))
    by_string = convert.completion_to_proto(Completion(0, FinishReason.STOP, "END", 1))
    assert (by_id.WhichOneof("stop_reason"), by_id.stop_token_id) == ("stop_token_id", 0)
    assert (by_string.WhichOneof("stop_reason"), by_string.stop_string) == ("stop_string", "END")


@pytest.mark.parametrize("cause", SplitCause)
def test_every_split_cause_has_its_number(cause: SplitCause) -> None:
    assert types_pb2.SplitCause.Name(types_pb2.SplitCause.ValueType(cause.value)) == f"SPLIT_CAUSE_{cause.name}"
    assert len(types_pb2.SplitCause.keys()) == len(SplitCause)


def test_a_split_cause_that_nobody_knows_is_refused_by_name() -> None:
    message = generation_pb2.GenerateRequest.FromString(b"\x50\x63")  # field 10: 99
    with pytest.raises(InvalidArgument, match="split_cause: there is no cause 99"):
        convert.call_request_from_proto(message)


def test_both_enums_have_a_member_for_every_value_of_the_contract() -> None:
    """Beside the zero value, which is never sent."""
    assert len(types_pb2.FinishReason.keys()) == len(FinishReason) + 1
    assert len(generation_pb2.LogprobsMode.keys()) == len(LogprobsMode) + 1
