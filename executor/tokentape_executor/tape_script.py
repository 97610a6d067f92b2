"""A tape as a script of the scripted engine, so that its rollout can be replayed without a model.

Calls come in the order of the tape, each with the whole prompt that it must be made with, and the steps by which its
choices got their tokens; how concurrent calls were interleaved is not kept. Given the recorded parameters, the scripted
engine then gives every call the recorded ids, log-probabilities, weight versions and ends, so that the samples and the
hash on the receipt are the recorded ones.

Two things a script cannot say: the marks `boundary_uncertain` and `stale_cache` are lost, and a call that failed fails
with INTERNAL, whatever its error was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokentape.v1 import generation_pb2, tape_pb2, types_pb2
from tokentape_executor.assembler import Assembler
from tokentape_executor.errors import TapeInconsistent

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
    types_pb2.FINISH_REASON_REPETITION: "repetition",
}


def to_script(entries: Sequence[tape_pb2.TapeEntry], model: generation_pb2.GetModelResponse) -> dict[str, Any]:
    """Return the script, as JSON takes it (`sidecar/README.md` has its format).

    `model` is what the tape's sidecar served. Raises `TapeInconsistent` where the entries are not a whole sealed tape.
    """
    assembler = Assembler()
    calls: dict[str, dict[str, Any]] = {}
    for entry in entries:
        assembler.feed(entry)
        match entry.WhichOneof("entry"):
            case "call_started":
                calls[entry.call_started.call_id] = {"steps": []}
            case "tokens_sampled":
                calls[entry.tokens_sampled.call_id]["steps"].append(_tokens(entry.tokens_sampled))
            case "choice_finished":
                calls[entry.choice_finished.call_id]["steps"].append(_end(entry.choice_finished.completion))
            case "call_failed":
                calls[entry.call_failed.call_id]["steps"].append({"error": entry.call_failed.message})
            case "tape_sealed" | None:
                pass
    if not assembler.sealed:
        raise TapeInconsistent("the tape is not sealed")
    for call_id, prompt in assembler.prompts().items():
        calls[call_id]["expect"] = {"prompt_token_ids": prompt}
    return {
        "model": {
            "name": model.name,
            "max_model_len": model.max_context_tokens,
            "vocab_size": model.vocabulary_size,
            "eos_token_ids": list(model.eos_token_ids),
            "max_logprobs": model.max_top_logprobs,
            "lora_names": list(model.lora_names),
        },
        "calls": list(calls.values()),
    }


def _tokens(sampled: tape_pb2.TapeEntry.TokensSampled) -> dict[str, Any]:
    top, k = sampled.top_logprobs, sampled.top_logprobs.k
    logprobs: list[dict[str, Any]] = []
    for index, (token_id, logprob) in enumerate(zip(sampled.token_ids, sampled.logprobs, strict=True)):
        best = slice(index * k, (index + 1) * k)
        # The sampled token last: where its value equals another's, the most probable stay the recorded ones.
        values = dict(zip(top.token_ids[best], top.logprobs[best], strict=True)) | {token_id: logprob}
        logprobs.append({str(each): _number(value) for each, value in values.items()})
    return {
        "index": sampled.choice,
        "token_ids": list(sampled.token_ids),
        "logprobs": logprobs,
        "weight_version": sampled.weight_version,
    }


def _number(value: float) -> float | str:
    """Return the value as a script has it: a masked token's is minus infinity, for which JSON has no number."""
    return "-Infinity" if value == float("-inf") else value


def _end(completion: types_pb2.Completion) -> dict[str, Any]:
    which = completion.WhichOneof("stop_reason")
    return {
        "index": completion.choice,
        "finish_reason": _FINISH_REASONS[completion.finish_reason],
        "stop_reason": getattr(completion, which) if which else None,
    }
