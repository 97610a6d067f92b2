"""A tape's ledger and its hash: what was asked and sampled, in a form that no reading of the tape changes.

`docs/tape-file.md` describes the form for other implementations; the two are to be changed together, with the version.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from tokentape_executor._drops import Place
from tokentape_executor._tree import Call, Choice
from tokentape_executor.receipt import DropReason, Receipt, SplitCause
from tokentape_executor.trajectory import Sample

_FIRST_LINE = b"tokentape ledger 1\n"


def ledger_sha256(calls: Iterable[Call]) -> str:
    """Return the hex SHA-256 of the ledger: a first line with its version, then one line of canonical JSON per call.

    It holds neither the calls' ids nor anything that depends on how the tape was chunked or interleaved; only the order
    in which the calls were made.
    """
    digest = hashlib.sha256(_FIRST_LINE)
    for call in calls:
        digest.update(json.dumps(_line(call), sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def make_receipt(
    calls: Sequence[Call], samples: Sequence[Sample], dropped: dict[Place, DropReason], sampled: int
) -> Receipt:
    """Return the account of a tape; `sampled` was counted as the tokens came. Raises `TapeInconsistent`."""
    lost = dict.fromkeys(DropReason, 0)
    for (call, choice), reason in dropped.items():
        lost[reason] += len(calls[call].choices[choice].token_ids)
    splits: dict[SplitCause, int] = {}
    for sample in samples:
        splits[sample.split_cause] = splits.get(sample.split_cause, 0) + 1
    runs = (run for call in calls for choice in call.choices for run in choice.weight_runs)
    return Receipt(
        sampled=sampled,
        kept=sum(sample.action_token_count for sample in samples),
        dropped=lost,
        samples=len(samples),
        splits=splits,
        calls=len(calls),
        weight_versions=tuple(dict.fromkeys(run.weight_version for run in runs)),
        ledger_sha256=ledger_sha256(calls),
    )


def _line(call: Call) -> dict[str, Any]:
    # Only where there is one, so that tapes without adapters keep their hash.
    lora = {"lora_name": call.lora_name} if call.lora_name else {}
    return {
        **lora,
        "call": call.index,
        "parent": call.parent_place,
        "split_cause": call.split_cause.value,
        "prompt_token_ids": _hex("I", call.prompt_token_ids),
        "sampling": MessageToDict(call.sampling, preserving_proto_field_name=True),
        "choices": [_choice(choice) for choice in call.choices],
    }


def _choice(choice: Choice) -> dict[str, Any]:
    assert choice.finish_reason is not None
    return {
        "token_ids": _hex("I", choice.token_ids),
        "logprobs": _hex("f", choice.logprobs),
        "weight_runs": [list(run) for run in choice.weight_runs],
        "finish_reason": choice.finish_reason.value,
        "stop_reason": choice.stop_reason,
    }


def _hex(kind: str, values: Sequence[float]) -> str:
    """Return 32-bit values, little-endian, in hex: the float32 that the tape holds, without a decimal form's doubt."""
    return struct.pack(f"<{len(values)}{kind}", *values).hex()
