"""E12: what counts as a reward, and what is told of what does not."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch

from tokentape_executor.errors import RewardInvalid
from tokentape_executor.reward import as_outcome, as_reward
from tokentape_executor.rollout import Outcome


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (0.0, 0.0),
        (0, 0.0),
        (1, 1.0),
        (-2.5, -2.5),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(3), 3.0),
        (numpy.array(0.0), 0.0),
        (numpy.array([0.25]), 0.25),
        (torch.tensor(1.0), 1.0),
        (torch.tensor([[0.5]], requires_grad=True), 0.5),
        (torch.tensor(1.0, dtype=torch.bfloat16), 1.0),
        ([1.0], 1.0),
        ((0,), 0.0),
        ([torch.tensor(0.0)], 0.0),
    ],
)
def test_e12_one_finite_number_is_a_reward_in_whatever_form(value: object, reward: float) -> None:
    got = as_reward(value)
    assert type(got) is float
    assert got == reward
    assert as_outcome(value) == Outcome(reward)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "NoneType None"),
        (float("nan"), "float nan"),
        (float("inf"), "float inf"),
        (-float("inf"), "float -inf"),
        (True, "bool True"),
        (False, "bool False"),
        ("1", "str '1'"),
        ("", "str ''"),
        ([], "list []"),
        ([1.0, 2.0], "list [1.0, 2.0]"),
        ([None], "list [None]"),
        ([True], "list [True]"),
        ([[1.0]], "list [[1.0]]"),
        ({}, "dict {}"),
        (1j, "complex 1j"),
        (10**400, "int 1000"),
        (Fraction(1, 2), "Fraction"),
        (numpy.array([1.0, 2.0]), "ndarray array([1., 2.])"),
        (numpy.array([]), "ndarray array([]"),
        (numpy.bool_(True), "bool"),
        (numpy.float64("nan"), "float64 "),
        (torch.tensor([1.0, 2.0]), "Tensor tensor([1., 2.])"),
        (torch.tensor(True), "Tensor tensor(True)"),
        (torch.tensor(float("nan")), "Tensor tensor(nan)"),
        (torch.empty(1, device="meta"), "Tensor "),
    ],
)
def test_e12_anything_else_is_none_and_named_and_never_zero(value: Any, told: str) -> None:
    with pytest.raises(RewardInvalid) as caught:
        as_reward(value)
    assert str(caught.value).startswith(f"the reward must be one finite number, not {told}")
    with pytest.raises(RewardInvalid):
        as_outcome(Outcome(value))


def test_e12_what_came_is_told_in_short() -> None:
    for value in ("x" * 100_000, [1.0] * 100_000, {"score": "x" * 100_000}):
        with pytest.raises(RewardInvalid) as caught:
            as_reward(value)
        assert len(str(caught.value)) < 300


def test_an_outcome_keeps_its_flag_and_its_report() -> None:
    outcome = as_outcome(Outcome(torch.tensor(0.0), truncated=True, report={"a": 1}))  # pyright: ignore[reportArgumentType]
    assert outcome == Outcome(0.0, truncated=True, report={"a": 1})
    assert type(outcome.reward) is float
