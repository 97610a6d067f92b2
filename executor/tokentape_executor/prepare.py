"""Rows for NeMo Gym's math environment, from a question and its answer."""

from __future__ import annotations

from typing import Any, Protocol

INSTRUCTION = "Solve the following math problem. Make sure to put the answer (and only answer) inside \\boxed{}."
"""What the environment's own example rows put before the question; the verifier looks for the box."""


class RowSampling(Protocol):
    """The part of vLLM's `SamplingParams` that a row carries. `None`: the model's default."""

    @property
    def temperature(self) -> float | None:
        """Softmax temperature."""
        ...

    @property
    def top_p(self) -> float | None:
        """Nucleus."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Most tokens to sample per call."""
        ...


def prepare_data(question: str, expected_answer: str, sampling_params: RowSampling) -> dict[str, Any]:
    """Return a row for the environment math_with_judge, as its `POST /run` takes it (nemo-gym 0.4).

    `question` is the problem's text, `expected_answer` what math-verify compares the boxed answer with. Of
    `sampling_params`, which is only read, the row carries what Gym has fields for; the tape's policy pins the rest.
    """
    sampling = {
        "temperature": sampling_params.temperature,
        "top_p": sampling_params.top_p,
        "max_output_tokens": sampling_params.max_tokens,
    }
    return {
        "responses_create_params": {
            "input": [{"role": "user", "content": f"{INSTRUCTION}\n\n{question}"}],
            **{name: value for name, value in sampling.items() if value is not None},
        },
        "question": question,
        "expected_answer": expected_answer,
    }
