"""The executor's settings, its errors, and what it derives from the trainer's parameters."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tokentape.v1 import types_pb2
from tokentape_executor import errors
from tokentape_executor.errors import ExecutorError, RolloutError, from_rpc_error
from tokentape_executor.gym_executor import tag_row
from tokentape_executor.prepare import prepare_data
from tokentape_executor.sampling_policy import sampling_policy
from tokentape_executor.settings import GYM_AGENT, GYM_CONFIGS, ExecutorSettings


@dataclass(frozen=True)
class SamplingParams:
    """Fields of vLLM's `SamplingParams`, with its defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    stop: str | list[str] = field(default_factory=list[str])
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None


def test_settings_are_read_from_the_environment() -> None:
    settings = ExecutorSettings.from_environment(
        {
            "TOKENTAPE_GYM_VENV": "/opt/gym",
            "TOKENTAPE_GYM_CONFIGS": "a.yaml, b.yaml",
            "TOKENTAPE_GYM_OVERRIDES": "++a.b.max_steps=3  '++a.c=[1, 2]'",
            "TOKENTAPE_GYM_AGENT": "my_agent",
            "TOKENTAPE_START_TIMEOUT": "7.5",
            "TOKENTAPE_ROLLOUT_TIMEOUT": "60",
            "TOKENTAPE_TAPE_KEEPING": "0.5",
            "TOKENTAPE_LOG_DIR": "/var/log/tokentape",
        }
    )
    assert settings == ExecutorSettings(
        gym_venv=Path("/opt/gym"),
        gym_configs=("a.yaml", "b.yaml"),
        gym_overrides=("++a.b.max_steps=3", "++a.c=[1, 2]"),
        gym_agent="my_agent",
        start_timeout_seconds=7.5,
        rollout_timeout_seconds=60.0,
        tape_time_to_live_seconds=0.5,
        log_directory=Path("/var/log/tokentape"),
    )


@pytest.mark.parametrize("environment", [{}, {"TOKENTAPE_GYM_VENV": "", "TOKENTAPE_ROLLOUT_TIMEOUT": "0"}])
def test_absent_and_empty_settings_are_the_defaults(environment: dict[str, str]) -> None:
    settings = ExecutorSettings.from_environment(environment)
    assert settings == ExecutorSettings()
    assert settings.gym_venv == Path(sys.prefix).parent / ".venv-gym"
    assert (settings.gym_configs, settings.gym_agent) == (GYM_CONFIGS, GYM_AGENT)
    assert settings.rollout_timeout_seconds is None


def test_overrides_with_an_open_quote_are_named() -> None:
    with pytest.raises(ValueError, match="TOKENTAPE_GYM_OVERRIDES: No closing quotation"):
        ExecutorSettings.from_environment({"TOKENTAPE_GYM_OVERRIDES": "'++a=1"})


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_malformed_setting_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"TOKENTAPE_START_TIMEOUT: .* is not a number of seconds"):
        ExecutorSettings.from_environment({"TOKENTAPE_START_TIMEOUT": text})


@pytest.mark.parametrize(
    ("code", "error", "retryable"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.SidecarUnavailable, True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.SidecarUnavailable, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.SidecarOverloaded, True),
        (grpc.StatusCode.NOT_FOUND, errors.TapeLost, True),
        (grpc.StatusCode.ABORTED, errors.WeightsChanged, True),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.RolloutRefused, False),
        (grpc.StatusCode.OUT_OF_RANGE, errors.RolloutRefused, False),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.RolloutRefused, False),
        (grpc.StatusCode.ALREADY_EXISTS, errors.RolloutRefused, False),
        (grpc.StatusCode.PERMISSION_DENIED, errors.RolloutRefused, False),
        (grpc.StatusCode.UNAUTHENTICATED, errors.RolloutRefused, False),
        (grpc.StatusCode.UNIMPLEMENTED, errors.RolloutRefused, False),
        (grpc.StatusCode.INTERNAL, errors.SidecarFailed, True),
        (grpc.StatusCode.UNKNOWN, errors.SidecarFailed, True),
    ],
)
def test_each_status_means_one_error(code: grpc.StatusCode, error: type[RolloutError], *, retryable: bool) -> None:
    metadata = grpc.aio.Metadata()
    got = from_rpc_error("opening a tape", grpc.aio.AioRpcError(code, metadata, metadata, details="because"))
    assert type(got) is error
    assert got.retryable is retryable
    assert str(got) == f"opening a tape failed with {code.name}: because"


def test_every_error_can_be_pickled() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ExecutorError)]
    assert len(kinds) > 10
    for kind in kinds:
        copy = pickle.loads(pickle.dumps(kind("what happened")))
        assert (type(copy), str(copy)) == (kind, "what happened")


def test_a_row_is_what_the_math_environment_takes() -> None:
    row = prepare_data("What is 2 + 3?", "5", SamplingParams(temperature=0.7, top_p=0.9, max_tokens=128))
    assert row == {
        "responses_create_params": {
            "input": [
                {
                    "role": "user",
                    "content": "Solve the following math problem. Make sure to put the answer (and only answer) "
                    "inside \\boxed{}.\n\nWhat is 2 + 3?",
                }
            ],
            "temperature": 0.7,
            "top_p": 0.9,
            "max_output_tokens": 128,
        },
        "question": "What is 2 + 3?",
        "expected_answer": "5",
    }


def test_a_row_leaves_out_what_the_trainer_leaves_open() -> None:
    params = prepare_data("?", "5", SamplingParams(temperature=0.0, max_tokens=None))["responses_create_params"]
    assert params["temperature"] == 0.0
    assert "max_output_tokens" not in params


def test_tagging_adds_to_the_metadata_and_changes_nothing_else() -> None:
    row = {"question": "?", "responses_create_params": {"input": "?", "metadata": {"mine": "1"}}}
    tagged = tag_row(row, "main.0123")
    assert tagged == {
        "question": "?",
        "responses_create_params": {"input": "?", "metadata": {"mine": "1", "tape_id": "main.0123"}},
    }
    assert row == {"question": "?", "responses_create_params": {"input": "?", "metadata": {"mine": "1"}}}


def test_the_policy_pins_all_scalars_of_the_trainer_but_seed_n_and_logprobs() -> None:
    policy = sampling_policy(SamplingParams(temperature=0.7, top_k=-1, max_tokens=64, seed=7, n=4, logprobs=1))
    assert policy == types_pb2.SamplingParameters(
        temperature=0.7,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        max_tokens=64,
        min_tokens=0,
        ignore_eos=False,
    )
    assert not policy.HasField("seed")
    assert not policy.HasField("n")


def test_the_policy_leaves_open_what_is_none_or_absent() -> None:
    assert not sampling_policy(SamplingParams(max_tokens=None)).HasField("max_tokens")
    assert sampling_policy(object()) == types_pb2.SamplingParameters()


def test_the_policy_pins_lists_and_biases() -> None:
    policy = sampling_policy(
        SamplingParams(stop="###", stop_token_ids=[7], bad_words=["no"], allowed_token_ids=[1, 2], logit_bias={3: -1.5})
    )
    assert (list(policy.stop), list(policy.stop_token_ids), list(policy.bad_words)) == (["###"], [7], ["no"])
    assert (list(policy.allowed_token_ids), dict(policy.logit_bias)) == ([1, 2], {3: -1.5})
