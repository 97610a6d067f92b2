"""What OpenRLHF sees of the executor before and after a rollout; the rollout itself is in `tests/real`."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs] # it ships none
import pytest

from support.agent_file import load_as_openrlhf_does
from tokentape.v1 import types_pb2
from tokentape_executor import errors, openrlhf
from tokentape_executor._openrlhf_base import AgentExecutorBase
from tokentape_executor._openrlhf_services import node_group
from tokentape_executor.errors import NothingSampled, RewardInvalid, StartFailed
from tokentape_executor.executor import TapeExecutor
from tokentape_executor.openrlhf import AgentExecutor
from tokentape_executor.openrlhf_result import openrlhf_result
from tokentape_executor.prepare import INSTRUCTION
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


def trajectory_of(*samples: Sample, dropped: dict[DropReason, int] | None = None) -> Trajectory:
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
    return Trajectory(list(samples), receipt, [])


def result(
    *samples: Sample, truncated: bool = False, reward: float = 1.0, dropped: dict[DropReason, int] | None = None
) -> dict[str, Any]:
    trajectory = trajectory_of(*samples, dropped=dropped)
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
            "attempts": 1.0,
            "failed": 0.0,
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
    with pytest.raises(RewardInvalid, match=f"not float {reward}"):
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


def test_the_module_is_an_agent_file() -> None:
    module = load_as_openrlhf_does(Path(inspect.getfile(openrlhf)))
    assert issubclass(module.AgentExecutor, AgentExecutorBase)
    assert callable(module.prepare_data)


def test_e14_an_executor_and_its_class_can_be_pickled_before_use(tmp_path: Path) -> None:
    settings = ExecutorSettings(gym_venv=tmp_path)
    for copy in (pickle.loads, cloudpickle.loads):
        executor = copy(cloudpickle.dumps(AgentExecutor(settings)))
        assert executor._settings == settings
        executor.shutdown()
        executor.shutdown()
    assert pickle.loads(pickle.dumps(AgentExecutor)) is AgentExecutor


def test_e14_a_class_from_a_file_can_be_pickled_by_value() -> None:
    module = load_as_openrlhf_does(Path(inspect.getfile(openrlhf)))
    kind: Any = cloudpickle.loads(cloudpickle.dumps(module.AgentExecutor))
    assert kind is not AgentExecutor
    assert AgentExecutorBase in kind.__mro__
    kind(ExecutorSettings()).shutdown()


def all_errors(kind: type[errors.ExecutorError]) -> list[type[errors.ExecutorError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in all_errors(child))]


@pytest.mark.parametrize("kind", all_errors(errors.ExecutorError))
def test_e14_errors_keep_type_and_message_through_a_pickle(kind: type[errors.ExecutorError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what, and what to do")))
    assert type(error) is kind
    assert str(error) == "what, and what to do"


class BrokenHook(AgentExecutor):
    """Fails in its first hook, a plain function; counts how often it was started."""

    starts = 0

    def _start_vllm_server(self, llm_engine: Any, hf_tokenizer: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] # as written for the reference
        self.starts += 1
        raise StartFailed(f"no {llm_engine} with {hf_tokenizer.name}")


class NotReady(AgentExecutor):
    """Its hooks are those of an executor for the reference: plain functions."""

    def _start_vllm_server(self, llm_engine: Any, hf_tokenizer: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] # as written for the reference
        pass

    def _wait_for_vllm_server(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] # as written for the reference
        return False


SAMPLING = SimpleNamespace(temperature=1.0, top_p=1.0, max_tokens=8)
TOKENIZER = SimpleNamespace(
    name="tokenizer", chat_template=None, bos_token=None, eos_token=None, added_tokens_decoder={}
)


async def execute(executor: AgentExecutor, prompt: Any = "?", **more: Any) -> dict[str, Any]:
    return await executor.execute(prompt, "5", SAMPLING, 64, TOKENIZER, "engine", **more)


@pytest.mark.parametrize("images", [[b""], "image.png", object()])
async def test_images_are_refused_before_anything_starts(images: Any) -> None:
    executor = BrokenHook()
    with pytest.raises(errors.ImagesUnsupported, match="`images`"):
        await execute(executor, images=images)
    assert executor.starts == 0


@pytest.mark.parametrize("images", [None, [], ()])
async def test_no_images_are_none(images: Any) -> None:
    with pytest.raises(StartFailed):
        await execute(BrokenHook(), images=images)


@pytest.mark.parametrize("prompt", [None, "<|im_start|>user\n?<|im_end|>\n"])
async def test_a_prompt_is_refused_before_anything_starts(prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = BrokenHook()
    token = SimpleNamespace(content="<|im_start|>", special=True)
    monkeypatch.setattr(TOKENIZER, "added_tokens_decoder", {0: token})
    with pytest.raises(errors.PromptRefused):
        await execute(executor, prompt)
    assert executor.starts == 0


async def test_a_start_that_failed_leaves_nothing_and_is_tried_again() -> None:
    executor = BrokenHook()
    for attempt in (1, 2):
        with pytest.raises(StartFailed, match="no engine with tokenizer"):
            await execute(executor)
        assert executor.starts == attempt
    executor.shutdown()


async def test_a_server_that_is_not_ready_is_a_failed_start() -> None:
    with pytest.raises(StartFailed, match="not ready"):
        await execute(NotReady())


SYSTEM, QUESTION = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}


@pytest.mark.parametrize(("prompt", "before"), [("1 + 1?", []), ([SYSTEM, QUESTION], [SYSTEM])])
def test_a_row_has_the_prompts_messages_and_the_instruction_in_the_last(prompt: Any, before: list[Any]) -> None:
    row = AgentExecutor().prepare(prompt, "2", SAMPLING)
    *first, last = row["responses_create_params"]["input"]
    assert first == before
    assert last == {"role": "user", "content": f"{INSTRUCTION}\n\n1 + 1?"}
    assert (row["question"], row["expected_answer"]) == ("1 + 1?", "2")


@pytest.mark.parametrize(("prompt", "messages"), [("1 + 1?", [QUESTION]), ([SYSTEM, QUESTION], [SYSTEM, QUESTION])])
def test_another_agents_task_has_messages_question_and_answer(prompt: Any, messages: list[Any]) -> None:
    class Other(AgentExecutor):
        agent = TapeExecutor

    assert Other().prepare(prompt, "2", SAMPLING) == {"messages": messages, "question": "1 + 1?", "answer": "2"}


@pytest.mark.parametrize("last", [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "?"}]}])
def test_a_conversation_must_end_with_a_users_text(last: Any) -> None:
    with pytest.raises(errors.PromptRefused, match="last message"):
        AgentExecutor().prepare([QUESTION, last], "2", SAMPLING)


def test_executors_of_a_group_share_those_of_a_process_do_too() -> None:
    assert node_group(ExecutorSettings(node_group="mine")) == "mine"
    assert node_group(ExecutorSettings()) == node_group(ExecutorSettings())
    assert f"process {os.getpid()} " in node_group(ExecutorSettings())


def test_in_ray_the_executors_of_a_job_share(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(gcs_address="10.0.0.1:6379", get_job_id=lambda: "07000000")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert node_group(ExecutorSettings()) == "ray 10.0.0.1:6379 job 07000000"
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert node_group(ExecutorSettings()).startswith("process ")


def test_a_sample_from_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(errors.TapeInconsistent, match="empty prompt"):
        result(sample(last_call=0, tokens=[1, 2], start=0))


def test_a_placeholder_is_told_by_its_logs() -> None:
    good = result(sample(last_call=0, tokens=[1, 2], start=1))
    rollout = Rollout(
        "main.0", trajectory_of(sample(last_call=0, tokens=[1, 2], start=1)), Outcome(0.0), 3, "AgentFailed: boom"
    )
    bad = openrlhf_result(rollout, prompt="?", label="5")
    assert list(bad["extra_logs"]) == list(good["extra_logs"])
    assert (bad["extra_logs"]["attempts"], bad["extra_logs"]["failed"]) == (3.0, 1.0)
    assert (bad["reward"], bad["scores"]) == (0.0, 0.0)
