"""A rollout as the dictionary that OpenRLHF takes (0.11.2, `SamplesGenerator._process_response_into_experience`)."""

from __future__ import annotations

from typing import Any

from tokentape_executor.errors import NothingSampled
from tokentape_executor.executor import Rollout
from tokentape_executor.trajectory import FinishReason, Sample


def openrlhf_result(rollout: Rollout, *, prompt: str, label: str) -> dict[str, Any]:
    """Return the rollout's main sample as OpenRLHF wants it.

    `observation_tokens`: all T token ids, prompt included. `action_ranges`: half-open, into them. `rollout_log_probs`:
    T floats, 0.0 outside the ranges; given also where the trainer asks for none, since the tape has them. `reward` and
    `scores`: the verifier's reward. `truncated`: whether a limit ended the last call, or the agent says so.
    `extra_logs`: floats, the same keys in every result.

    OpenRLHF takes one sequence per rollout. Where a rollout has several samples (its history was changed, it forked, or
    asked for several choices), the main one is that with the latest call that completed: it ends with what was
    verified. The others' tokens are not trained on; `extra_logs` counts them. Raises `NothingSampled` where no token
    was sampled: a sample without an action makes the trainer's masked means 0/0.
    """
    trajectory = rollout.trajectory
    if not trajectory.samples:
        raise NothingSampled(f"no token was sampled in {trajectory.call_count} calls")
    sample = max(trajectory.samples, key=lambda each: (each.finish_reason.complete, each.last_call_index))
    reward = rollout.outcome.reward
    return {
        "prompt": prompt,
        "label": label,
        "observation_tokens": sample.tokens,
        "action_ranges": sample.action_ranges,
        "rollout_log_probs": sample.logprobs,
        "reward": reward,
        "scores": reward,
        "truncated": sample.finish_reason is FinishReason.LENGTH or rollout.outcome.truncated,
        "extra_logs": _extra_logs(rollout, sample),
    }


def _extra_logs(rollout: Rollout, sample: Sample) -> dict[str, float]:
    trajectory = rollout.trajectory
    return {
        "calls": float(trajectory.call_count),
        "turns": float(len(sample.action_ranges)),
        "sampled_tokens": float(sample.action_token_count),
        "other_samples": float(len(trajectory.samples) - 1),
        "other_sampled_tokens": float(trajectory.sampled_token_count - sample.action_token_count),
        "weight_versions": float(len({span.weight_version for span in sample.version_spans})),
    }
