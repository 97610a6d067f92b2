"""Rows of `tokentape-rollout`, made of real trajectories."""

from __future__ import annotations

from collections.abc import Sequence

from support.tape_model import ModelCall, Token, tape_of
from tokentape.v1 import types_pb2
from tokentape_executor.assembler import Assembler
from tokentape_executor.cli.prompts import Prompt
from tokentape_executor.cli.row import Json, result_row
from tokentape_executor.errors import AgentFailed, RolloutError
from tokentape_executor.rollout import FailedRollout, Outcome, Rollout

TERMS = {"--agent": "agent.py:Agent", "--temperature": 0.7, "--top-p": None}


def prompt(index: int, text: str | None = None) -> Prompt:
    return Prompt(index, text or f'{{"question": "{index}"}}', {"question": str(index)})


def rollout(*ids: int, reward: float = 1.0, failure: str | None = None, version: str = "1") -> Rollout:
    """A rollout of one call that sampled `ids`."""
    tokens = tuple(Token(token_id, -0.5, version) for token_id in ids)
    assembler = Assembler()
    for entry in tape_of(ModelCall((1, 2), (tokens,), cause=types_pb2.SPLIT_CAUSE_NEW_CONVERSATION)):
        assembler.feed(entry)
    return Rollout("main.0", assembler.trajectory(), Outcome(reward), failure=failure)


def row(index: int, sample: int = 0, *, ids: Sequence[int] = (10, 11), reward: float = 1.0) -> Json:
    return result_row(prompt(index), sample, rollout(*ids, reward=reward), terms=TERMS, seconds=0.5)


def failed_row(index: int, sample: int = 0, *, error: RolloutError | None = None, attempts: int = 3) -> Json:
    failed = FailedRollout(0, error or AgentFailed("ValueError: no"), attempts)
    return result_row(prompt(index), sample, failed, terms=TERMS, seconds=0.5)
