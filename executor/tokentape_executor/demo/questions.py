"""The demo's questions: within reach of a model of 135 million parameters, but not safe in its hands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """A math problem and the answer that NeMo Gym's verifier expects."""

    prompt: str
    label: str


QUESTIONS = (
    Question("What is 2 + 3?", "5"),
    Question("Tom has 3 apples and buys 4 more. How many apples does Tom have?", "7"),
    Question("What is 3 times 4?", "12"),
)
