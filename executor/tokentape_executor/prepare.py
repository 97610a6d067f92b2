"""Agents' tasks from what a trainer's data has: a question and its answer."""

from __future__ import annotations

import reprlib
from typing import Any, Protocol

from tokentape_executor.errors import PromptRefused
from tokentape_executor.markup import Message, Prompt

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


def prepare_data(question: Prompt, expected_answer: str, sampling_params: RowSampling) -> dict[str, Any]:
    """Return a row for the environment math_with_judge, as its `POST /run` takes it (nemo-gym 0.4).

    `question` is the problem's text, or messages of which the last is a user's with it; those before, such as a system
    message, come first in the agent's input. `expected_answer` is what math-verify compares the boxed answer with. Of
    `sampling_params`, which is only read, the row carries what Gym has fields for; the tape's policy pins the rest.
    Raises `PromptRefused` where the last message is no user's text.
    """
    *before, last = messages_of(question)
    text = _text_of(last)
    sampling = {
        "temperature": sampling_params.temperature,
        "top_p": sampling_params.top_p,
        "max_output_tokens": sampling_params.max_tokens,
    }
    return {
        "responses_create_params": {
            "input": [*before, {"role": "user", "content": f"{INSTRUCTION}\n\n{text}"}],
            **{name: value for name, value in sampling.items() if value is not None},
        },
        "question": text,
        "expected_answer": expected_answer,
    }


def task_of(prompt: Prompt, label: object) -> dict[str, Any]:
    """Return a task for an agent of one's own: `messages`, `question` (the last one's text) and `answer` (the label).

    Raises `PromptRefused` where the last message is no user's text.
    """
    messages = messages_of(prompt)
    return {"messages": messages, "question": _text_of(messages[-1]), "answer": label}


def messages_of(prompt: Prompt) -> list[Message]:
    """Return the prompt as messages, at least one."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _text_of(message: Message) -> str:
    content = message.get("content")
    if message["role"] != "user" or not isinstance(content, str):
        raise PromptRefused(
            f"the prompt's last message must be a user's, its content text, not {reprlib.repr(message)}"
        )
    return content
