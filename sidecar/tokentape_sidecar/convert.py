"""Between protobuf messages and the domain. Nothing is decided here; absent stays absent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokentape.text_pieces import TextPieces
from tokentape.v1 import generation_pb2, tape_pb2, types_pb2
from tokentape_sidecar import tape as tapes
from tokentape_sidecar.call_request import CallReference, CallRequest
from tokentape_sidecar.choice_record import Completion, TokenRun
from tokentape_sidecar.engine import FinishReason, LogprobsMode, Model, Sampling, StructuredOutput, TopLogprobs
from tokentape_sidecar.errors import InvalidArgument
from tokentape_sidecar.origin import Origin, SplitCause
from tokentape_sidecar.record import CallRecord, Parent
from tokentape_sidecar.tape import TapeLimits, TapePolicy

_SCALARS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_tokens",
    "min_tokens",
    "n",
    "seed",
    "ignore_eos",
    "top_logprobs",
    "prompt_logprobs",
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")

_FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
    FinishReason.REPETITION: types_pb2.FINISH_REASON_REPETITION,
}
_LOGPROBS_MODES = {
    LogprobsMode.RAW: generation_pb2.LOGPROBS_MODE_RAW,
    LogprobsMode.PROCESSED: generation_pb2.LOGPROBS_MODE_PROCESSED,
}


def sampling_from_proto(message: types_pb2.SamplingParameters) -> Sampling:
    """Read sampling parameters."""
    given: dict[str, Any] = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    given |= {name: tuple(getattr(message, name)) for name in _LISTS}
    output = message.structured_output if message.HasField("structured_output") else None
    return Sampling(
        **given,
        logit_bias=dict(message.logit_bias),
        structured_output=_structured_output_from_proto(output),
    )


def _structured_output_from_proto(message: types_pb2.StructuredOutput | None) -> StructuredOutput | None:
    form = message.WhichOneof("form") if message is not None else None
    if message is None or form is None:
        return None
    if form == "choices":
        return StructuredOutput(form, tuple(message.choices.values))
    if form == "json_object":
        return StructuredOutput(form) if message.json_object else None
    return StructuredOutput(form, getattr(message, form))


def sampling_to_proto(sampling: Sampling) -> types_pb2.SamplingParameters:
    """Write sampling parameters."""
    message = types_pb2.SamplingParameters(
        **{name: value for name in _SCALARS if (value := getattr(sampling, name)) is not None},
        **{name: getattr(sampling, name) for name in _LISTS},
        logit_bias=sampling.logit_bias,
    )
    output = sampling.structured_output
    if output is not None:
        if output.form == "choices":
            message.structured_output.choices.values.extend(output.value)
        elif output.form == "json_object":
            message.structured_output.json_object = True
        else:
            setattr(message.structured_output, output.form, output.value)
    return message


def call_request_from_proto(message: generation_pb2.GenerateRequest) -> CallRequest:
    """Read a call."""
    return CallRequest(
        prompt_token_ids=message.prompt_token_ids,
        parent=_reference_from_proto(message.parent) if message.HasField("parent") else None,
        sampling=sampling_from_proto(message.sampling),
        origin=Origin(message.anchor, message.context_fingerprint, _split_cause(message.split_cause)),
        priority=message.priority,
        lora_name=message.lora_name,
        cache_salt=message.cache_salt,
    )


def _split_cause(number: int) -> SplitCause:
    try:
        return SplitCause(number)
    except ValueError:
        raise InvalidArgument("split_cause", f"there is no cause {number}") from None


def _reference_from_proto(message: types_pb2.CallReference) -> CallReference:
    return CallReference(message.call_id, message.choice, message.offset if message.HasField("offset") else None)


def _reference_to_proto(parent: Parent) -> types_pb2.CallReference:
    return types_pb2.CallReference(call_id=parent.record.call_id, choice=parent.choice, offset=parent.offset)


def limits_from_proto(message: tape_pb2.TapeLimits) -> TapeLimits:
    """Read a tape's limits."""
    return TapeLimits(
        max_context_tokens=message.max_context_tokens if message.HasField("max_context_tokens") else None,
        max_sampled_tokens=message.max_sampled_tokens if message.HasField("max_sampled_tokens") else None,
        max_calls=message.max_calls if message.HasField("max_calls") else None,
        # Plain arithmetic: a Duration can hold what a timedelta cannot.
        time_to_live_seconds=message.time_to_live.seconds + message.time_to_live.nanos / 1e9
        if message.HasField("time_to_live")
        else None,
        max_weight_changes=message.max_weight_changes if message.HasField("max_weight_changes") else None,
    )


def policy_from_proto(message: tape_pb2.OpenTapeRequest) -> TapePolicy:
    """Read a tape's sampling policy."""
    return TapePolicy(
        sampling=sampling_from_proto(message.sampling_policy),
        seed=message.policy_seed if message.HasField("policy_seed") else None,
        keep_reasoning=message.keep_reasoning,
    )


def completion_to_proto(completion: Completion) -> types_pb2.Completion:
    """Write how a choice ended."""
    message = types_pb2.Completion(
        choice=completion.choice,
        finish_reason=_FINISH_REASONS[completion.finish_reason],
        token_count=completion.token_count,
    )
    if isinstance(completion.stop_reason, int):
        message.stop_token_id = completion.stop_reason
    elif completion.stop_reason is not None:
        message.stop_string = completion.stop_reason
    return message


def _top_to_proto(top: TopLogprobs | None) -> types_pb2.TopLogprobs | None:
    return top and types_pb2.TopLogprobs(k=top.k, token_ids=top.token_ids, logprobs=top.logprobs)


def started_to_proto(record: CallRecord) -> generation_pb2.GenerateResponse:
    """Write a call's first event."""
    return generation_pb2.GenerateResponse(
        started=generation_pb2.GenerateResponse.Started(
            call_id=record.call_id,
            prompt_token_count=record.prompt_token_count,
            max_tokens=record.sampling.max_tokens or 0,
            prompt_logprobs=record.prompt_logprobs,
            prompt_top_logprobs=_top_to_proto(record.prompt_top_logprobs),
        )
    )


def event_to_proto(event: TokenRun | Completion) -> generation_pb2.GenerateResponse:
    """Write what a reader of a call found."""
    if isinstance(event, Completion):
        return generation_pb2.GenerateResponse(finished=completion_to_proto(event))
    return generation_pb2.GenerateResponse(
        delta=generation_pb2.GenerateResponse.Delta(
            choice=event.choice,
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            top_logprobs=_top_to_proto(event.top_logprobs),
            weight_version=event.weights.version,
        )
    )


def entry_to_proto(entry: tapes.Entry, pieces: TextPieces | None = None) -> tape_pb2.TapeEntry:
    """Write an entry of a tape, with the text of its tokens where `pieces` has it."""
    message = tape_pb2.TapeEntry(sequence=entry.sequence)
    match entry:
        case tapes.CallStarted(record=record):
            message.call_started.CopyFrom(_call_started_to_proto(record))
            message.call_started.text_pieces.extend(_texts(record.prompt_suffix, pieces))
        case tapes.TokensSampled(record=record, run=run):
            message.tokens_sampled.CopyFrom(
                tape_pb2.TapeEntry.TokensSampled(
                    call_id=record.call_id,
                    choice=run.choice,
                    token_ids=run.token_ids,
                    logprobs=run.logprobs,
                    top_logprobs=_top_to_proto(run.top_logprobs),
                    weight_version=run.weights.version,
                    boundary_uncertain=run.weights.boundary_uncertain,
                    stale_cache=run.weights.stale_cache,
                    text_pieces=_texts(run.token_ids, pieces),
                )
            )
        case tapes.ChoiceFinished(record=record, completion=completion):
            message.choice_finished.call_id = record.call_id
            message.choice_finished.completion.CopyFrom(completion_to_proto(completion))
        case tapes.CallFailed(record=record):
            message.call_failed.call_id = record.call_id
            message.call_failed.message = str(record.error)
        case tapes.Sealed():
            message.tape_sealed.call_count = entry.call_count
            message.tape_sealed.sampled_token_count = entry.sampled_token_count
    return message


def _texts(token_ids: Iterable[int], pieces: TextPieces | None) -> list[str]:
    return [] if pieces is None else [pieces[token_id] for token_id in token_ids]


def _call_started_to_proto(record: CallRecord) -> tape_pb2.TapeEntry.CallStarted:
    return tape_pb2.TapeEntry.CallStarted(
        call_id=record.call_id,
        call_index=record.call_index,
        parent=_reference_to_proto(record.parent) if record.parent else None,
        prompt_token_ids=record.prompt_suffix,
        prompt_token_count=record.prompt_token_count,
        sampling=sampling_to_proto(record.sampling),
        anchor=record.origin.anchor,
        split_cause=types_pb2.SplitCause.ValueType(0 if record.parent else record.origin.split_cause.value),
        lora_name=record.lora_name,
    )


def found_call_to_proto(record: CallRecord, *, include_prompt: bool) -> tape_pb2.FindCallsResponse.FoundCall:
    """Write a call with its completions, and its whole prompt if wanted."""
    return tape_pb2.FindCallsResponse.FoundCall(
        call_id=record.call_id,
        anchor=record.origin.anchor,
        context_fingerprint=record.origin.context_fingerprint,
        lora_name=record.lora_name,
        prompt_token_ids=record.prompt_token_ids() if include_prompt else None,
        choices=[
            tape_pb2.FindCallsResponse.FoundChoice(
                token_ids=choice.token_ids,
                completion=completion_to_proto(choice.completion) if choice.completion else None,
            )
            for choice in record.choices
        ],
    )


def model_to_proto(model: Model, *, weight_version: str, sidecar_name: str) -> generation_pb2.GetModelResponse:
    """Write what the sidecar serves."""
    return generation_pb2.GetModelResponse(
        name=model.name,
        max_context_tokens=model.max_context_tokens,
        vocabulary_size=model.vocabulary_size,
        eos_token_ids=model.eos_token_ids,
        logprobs_mode=_LOGPROBS_MODES[model.logprobs_mode],
        default_sampling=sampling_to_proto(model.default_sampling),
        engine=model.engine,
        engine_version=model.engine_version,
        weight_version=weight_version,
        sidecar_name=sidecar_name,
        max_top_logprobs=model.max_top_logprobs,
        lora_names=model.lora_names,
    )
