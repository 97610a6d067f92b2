"""What comes out: one rollout as one flat JSON object, with the same keys and types in every row.

Nothing is ever null and nothing is left out: what a failed rollout does not have is "", 0, 0.0 or [], so that
`datasets.load_dataset("json", …)` finds one schema however the rollouts went.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from tokentape_executor.cli.prompts import Prompt
from tokentape_executor.cli.terms import Terms
from tokentape_executor.receipt import DropReason, Receipt, SplitCause
from tokentape_executor.rollout import FailedRollout, Rollout
from tokentape_executor.trajectory import Action, Sample, VersionSpan

Json: TypeAlias = "dict[str, Any]"

COMPLETED, FAILED, PLACEHOLDER = "completed", "failed", "placeholder"
"""The statuses of a row."""

_NO_PARENT = -1


def result_row(
    prompt: Prompt, sample_index: int, result: Rollout | FailedRollout, *, terms: Terms, seconds: float
) -> Json:
    """Return the row of one rollout of `prompt`, made on `terms`, which took `seconds` with all its attempts."""
    return {
        "prompt_index": prompt.index,
        "sample_index": sample_index,
        "task": prompt.text,
        "terms": json.dumps(terms, ensure_ascii=False),
        **(_of_rollout(result) if isinstance(result, Rollout) else _of_failure(result)),
        "seconds": round(seconds, 3),
    }


def to_line(row: Json) -> bytes:
    """Return the row as a line of the file. Raises `ValueError` for a number that JSON does not have."""
    return (json.dumps(row, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n").encode()


def _of_rollout(rollout: Rollout) -> Json:
    samples = rollout.trajectory.samples
    return {
        "status": COMPLETED if rollout.failure is None else PLACEHOLDER,
        "error": _encodable(rollout.failure or ""),
        "error_type": "" if rollout.failure is None else _type_in(rollout.failure),
        "attempts": rollout.attempts,
        "reward": float(rollout.outcome.reward),
        "truncated": rollout.outcome.truncated or _is_last_truncated(samples),
        "tape_id": rollout.tape_id,
        "samples": [_sample(sample) for sample in samples],
        "receipt": _receipt(rollout.trajectory.receipt),
    }


def _is_last_truncated(samples: Sequence[Sample]) -> bool:
    """Whether a limit ended the latest call; a rollout without a sampled token has none."""
    return bool(samples) and max(samples, key=lambda sample: sample.last_call_index).truncated


def _of_failure(failed: FailedRollout) -> Json:
    return {
        "status": FAILED,
        "error": _encodable(str(failed.error)),
        "error_type": type(failed.error).__name__,
        "attempts": failed.attempts,
        "reward": 0.0,
        "truncated": False,
        "tape_id": "",
        "samples": [],
        "receipt": _receipt(None),
    }


def _sample(sample: Sample) -> Json:
    return {
        "tokens": sample.tokens,
        "action_ranges": [list(action) for action in sample.action_ranges],
        "logprobs": [float(logprob) for logprob in sample.logprobs],
        "split_cause": sample.split_cause.value,
        "lora_name": sample.lora_name,
        "finish_reason": sample.finish_reason.value,
        "truncated": sample.truncated,
        "actions": [_action(action) for action in sample.actions],
        "weight_versions": [_span(span) for span in sample.version_spans],
        "parent_sample": _NO_PARENT if sample.parent is None else sample.parent.sample,
        "parent_token_count": 0 if sample.parent is None else sample.parent.token_count,
    }


def _action(action: Action) -> Json:
    return {
        "start": action.start,
        "end": action.end,
        "call_index": action.call_index,
        "choice": action.choice,
        "finish_reason": action.finish_reason.value,
    }


def _span(span: VersionSpan) -> Json:
    return {
        "start": span.start,
        "end": span.end,
        "weight_version": span.weight_version,
        "boundary_uncertain": span.boundary_uncertain,
        "stale_cache": span.stale_cache,
    }


def _receipt(receipt: Receipt | None) -> Json:
    """Return the receipt with every reason and every cause as a key; `None`: that of a rollout that left no tape."""
    return {
        "sampled": receipt.sampled if receipt else 0,
        "kept": receipt.kept if receipt else 0,
        "dropped": {reason.value: receipt.dropped.get(reason, 0) if receipt else 0 for reason in DropReason},
        "samples": receipt.samples if receipt else 0,
        "splits": {cause.value: receipt.splits.get(cause, 0) if receipt else 0 for cause in SplitCause},
        "calls": receipt.calls if receipt else 0,
        "weight_versions": list(receipt.weight_versions) if receipt else [],
        "ledger_sha256": receipt.ledger_sha256 if receipt else "",
    }


def _type_in(failure: str) -> str:
    """Return the error's type, which a placeholder's failure begins with."""
    return failure.partition(":")[0]


def _encodable(text: str) -> str:
    """Return the text as UTF-8 can have it: an agent's error may quote half a character."""
    return text.encode(errors="replace").decode()
