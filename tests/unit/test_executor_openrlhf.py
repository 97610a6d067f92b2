"""What OpenRLHF sees of the executor before and after a rollout; the rollout itself is in `tests/real`."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs] # it ships none
import pytest

from tokentape.v1 import types_pb2
from tokentape_executor import openrlhf
from tokentape_executor._openrlhf_base import AgentExecutorBase
from tokentape_executor.errors import AgentFailed, ImagesUnsupported, NothingSampled, StartFailed
from tokentape_executor.openrlhf import AgentExecutor
from tokentape_executor.openrlhf_result import openrlhf_result
from tokentape_executor.receipt import DropReason, Receipt, SplitCause
from tokentape_executor.rollout import Outcome, Rollout
from tokentape_executor.settings import ExecutorSettings
from tokentape_executor.trajectory import Action, FinishReason, Sample, Trajectory, VersionSpan


def sample(*, last_call: int, tokens: list[int], start: int, reason: FinishReason = FinishReason.STOP) -> Sample:
    count = len(tokens) - start
    return Sample(
        tokens=tokens,
        actions=[Action(start, len(tokens), last_call, 0, reason, types_pb2.SamplingParameters())],
        logprobs=[0.0] * start + [-1.0] * count,
        version_spans=[VersionSpan(start, len(tokens), "")],
        call_indices=[last_call],
        finish_reason=reason,
        split_cause=SplitCause.NEW_CONVERSATION,
        parent=None,
    )


def result(
    *samples: Sample, truncated: bool = False, reward: float = 1.0, dropped: dict[DropReason, int] | None = None
) -> dict[str, Any]:
    lost = dict.fromkeys(DropReason, 0) | (dropped or {})
    kept = sum(each.action_token_count for each in samples)
    splits = {SplitCause.NEW_CONVERSATION: 1, SplitCause.HISTORY_EDITED: len(samples) - 1} if samples else {}
    receipt = Receipt(
        sampled=kept + sum(lost.values()),
        kept=kept,
        dropped=lost,
        samples=len(samples),
        splits=splits,
        calls=len(samples) + len(dropped or {}),
        weight_versions=("1", "2"),
        ledger_sha256="",
    )
    trajectory = Trajectory(list(samples), receipt, [])
    return openrlhf_result(Rollout("main.0", trajectory, Outcome(reward, truncated, {})), prompt="?", label="5")


def test_an_aborted_call_is_not_the_result() -> None:
    answer = sample(last_call=1, tokens=[1, 2], start=1)
    stray = sample(last_call=2, tokens=[1, 3], start=1, reason=FinishReason.ABORT)
    assert result(answer, stray)["observation_tokens"] == [1, 2]
    assert result(stray)["observation_tokens"] == [1, 3]


def test_the_result_is_the_sample_with_the_latest_call() -> None:
    main = sample(last_call=2, tokens=[1, 2, 3, 4], start=2)
    other = sample(last_call=1, tokens=[5, 6, 7, 8], start=1)
    got = result(main, other, dropped={DropReason.SUPERSEDED: 4, DropReason.FAILED: 3})

    assert got == {
        "prompt": "?",
        "label": "5",
        "observation_tokens": [1, 2, 3, 4],
        "action_ranges": [(2, 4)],
        "rollout_log_probs": [0.0, 0.0, -1.0, -1.0],
        "reward": 1.0,
        "scores": 1.0,
        "truncated": False,
        "extra_logs": {
            "calls": 4.0,
            "turns": 1.0,
            "sampled_tokens": 2.0,
            "other_sampled_tokens": 3.0,
            "samples": 2.0,
            "splits": 1.0,
            "dropped_tokens": 7.0,
            "dropped_superseded": 4.0,
            "dropped_abandoned": 0.0,
            "dropped_failed": 3.0,
            "weight_versions": 2.0,
        },
    }


def test_every_result_has_the_same_logs() -> None:
    some = result(sample(last_call=2, tokens=[1, 2], start=1), dropped={DropReason.ABANDONED: 1})
    none = result(sample(last_call=0, tokens=[1, 2], start=1))
    assert list(some["extra_logs"]) == list(none["extra_logs"])
    assert all(isinstance(value, float) for value in some["extra_logs"].values())


@pytest.mark.parametrize(
    ("reason", "said", "truncated"),
    [
        (FinishReason.STOP, False, False),
        (FinishReason.LENGTH, False, True),
        (FinishReason.STOP, True, True),
        (FinishReason.ABORT, False, False),
    ],
)
def test_truncated_is_a_limit_at_the_engine_or_at_the_agent(
    reason: FinishReason, *, said: bool, truncated: bool
) -> None:
    assert result(sample(last_call=0, tokens=[1, 2], start=1, reason=reason), truncated=said)["truncated"] is truncated


def test_a_rollout_without_a_token_is_an_error() -> None:
    with pytest.raises(NothingSampled, match="in 0 calls; dropped: none"):
        result()
    with pytest.raises(NothingSampled, match="in 1 calls; dropped: 12 abandoned"):
        result(dropped={DropReason.ABANDONED: 12})


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_e12_a_reward_that_is_no_number_is_an_error_and_never_zero(reward: float) -> None:
    with pytest.raises(AgentFailed, match=f"reward is {reward}"):
        result(sample(last_call=0, tokens=[1, 2], start=1), reward=reward)


def test_e12_a_reward_of_zero_is_kept() -> None:
    got = result(sample(last_call=0, tokens=[1, 2], start=1), reward=0.0)
    assert (got["reward"], got["scores"]) == (0.0, 0.0)


def test_the_public_surface_is_the_references() -> None:
    parameters = list(inspect.signature(AgentExecutor.execute).parameters)
    assert parameters[1:] == [
        *("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine", "images"),
    ]
    assert list(inspect.signature(openrlhf.prepare_data).parameters) == [
        *("question", "expected_answer", "sampling_params"),
    ]
    for name in ("_start_vllm_server", "_wait_for_vllm_server", "_start_nemogym_services", "shutdown"):
        assert callable(getattr(AgentExecutor, name))
    assert issubclass(AgentExecutor, AgentExecutorBase)


def load_as_openrlhf_does(path: str) -> ModuleType:
    """As `openrlhf/trainer/ray/vllm_engine.py` does: executed, but not entered in sys.modules."""
    spec = importlib.util.spec_from_file_location("agent_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_module_is_an_agent_file() -> None:
    module = load_as_openrlhf_does(inspect.getfile(openrlhf))
    assert issubclass(module.AgentExecutor, AgentExecutorBase)
    assert callable(module.prepare_data)


def test_before_its_start_an_executor_holds_nothing_and_can_be_pickled(tmp_path: Path) -> None:
    executor = cloudpickle.loads(cloudpickle.dumps(AgentExecutor(ExecutorSettings(gym_venv=tmp_path))))
    executor.shutdown()
    executor.shutdown()


async def test_images_are_refused_before_anything_starts() -> None:
    with pytest.raises(ImagesUnsupported):
        await AgentExecutor().execute("?", "5", None, 64, None, None, images=[b""])


class BrokenHook(AgentExecutor):
    """Fails in its first hook, a plain function; counts how often it was started."""

    starts = 0

    def _start_vllm_server(self, llm_engine: Any, hf_tokenizer: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] # as written for the reference
        self.starts += 1
        self.directory = self._running_services().group.directory
        raise StartFailed(f"no {llm_engine} with {hf_tokenizer}")


async def test_a_start_that_failed_leaves_nothing_and_is_tried_again() -> None:
    executor = BrokenHook()
    for attempt in (1, 2):
        with pytest.raises(StartFailed, match="no engine with tokenizer"):
            await executor.execute("?", "5", None, 64, "tokenizer", "engine")
        assert executor.starts == attempt
        assert not executor.directory.exists()
    executor.shutdown()
