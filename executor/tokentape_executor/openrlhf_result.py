"""A rollout as the dictionary that OpenRLHF takes (0.11.2, `SamplesGenerator._process_response_into_experience`)."""

from __future__ import annotations

from typing import Any

from tokentape_executor.errors import TapeInconsistent
from tokentape_executor.reward import as_reward
from tokentape_executor.rollout import Rollout
from tokentape_executor.trajectory import Sample


def openrlhf_result(rollout: Rollout, *, prompt: object, label: object) -> dict[str, Any]:
    """Return the rollout's main sample as OpenRLHF wants it.

    `observation_tokens`: all T token ids, prompt included. `action_ranges`: half-open, into them. `rollout_log_probs`:
    T floats, 0.0 outside the ranges; given also where the trainer asks for none, since the tape has them. `reward` and
    `scores`: the verifier's reward. `truncated`: whether a limit ended the last call, or the agent says so; a limit
    that an earlier call met does not count. `extra_logs`: floats, the same keys in every result, placeholders' too.

    OpenRLHF takes one sequence per rollout. Where a rollout has several samples (its history was changed, it forked, or
    asked for several choices), the main one is that with the latest call that completed: it ends with what was
    verified. The others' tokens are not trained on; `extra_logs` counts them.

    Raises `NothingSampled` where no sampled token was kept: a sample without an action makes the trainer's masked means
    0/0. Raises `RewardInvalid` where the reward is not a finite number: one NaN makes a whole batch's means NaN.
    """
    trajectory = rollout.trajectory
    trajectory.check_sampled()
    reward = as_reward(rollout.outcome.reward)
    sample = max(trajectory.samples, key=lambda each: (each.finish_reason.complete, each.last_call_index))
    if sample.actions[0].start == 0:
        raise TapeInconsistent("a token was sampled from an empty prompt; OpenRLHF's masks begin at the second token")
    return {
        "prompt": prompt,
        "label": label,
        "observation_tokens": sample.tokens,
        "action_ranges": sample.action_ranges,
        "rollout_log_probs": sample.logprobs,
        "reward": reward,
        "scores": reward,
        "truncated": sample.truncated or rollout.outcome.truncated,
        "extra_logs": _extra_logs(rollout, sample),
    }


def _extra_logs(rollout: Rollout, sample: Sample) -> dict[str, float]:
    receipt = rollout.trajectory.receipt
    return {
        "attempts": float(rollout.attempts),
        "failed": float(rollout.failure is not None),
        "calls": float(receipt.calls),
        "turns": float(len(sample.actions)),
        "sampled_tokens": float(sample.action_token_count),
        "other_sampled_tokens": float(receipt.kept - sample.action_token_count),
        "samples": float(receipt.samples),
        "splits": float(receipt.split_total),
        "dropped_tokens": float(receipt.dropped_total),
        **{f"dropped_{reason}": float(count) for reason, count in receipt.dropped.items()},
        "weight_versions": float(len(receipt.weight_versions)),
    }
