"""What goes in: a file of JSON lines, a task each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from tokentape_executor.cli.arguments import SamplingOptions
from tokentape_executor.errors import ExecutorError, PromptRefused
from tokentape_executor.prepare import prepare_data
from tokentape_executor.rollout import Row

Prepare: TypeAlias = Callable[[dict[str, Any]], Row]
"""Makes a task of a line's object. Raises `ValueError` where it is none."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line."""

    index: int
    """From 0; blank lines do not count."""
    text: str
    """Its object as JSON, white space aside as in the file: by this a later run knows it again."""
    task: Row
    """What the agent is run on."""


def read_prompts(path: Path, prepare: Prepare) -> list[Prompt]:
    """Return the prompts of a file, at least one. Raises `ExecutorError`, naming file and line of what is wrong."""
    prompts: list[Prompt] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    prompts.append(_prompt(len(prompts), line, prepare, f"{path}:{number}"))
    except OSError as error:
        raise ExecutorError(f"cannot read {path}: {error.strerror}") from None
    if not prompts:
        raise ExecutorError(f"{path}: there is no prompt in it")
    return prompts


def _prompt(index: int, line: bytes, prepare: Prepare, place: str) -> Prompt:
    try:
        row: object = json.loads(line)
    except ValueError as error:
        raise ExecutorError(f"{place}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ExecutorError(f"{place}: must be a JSON object, not {line.decode(errors='replace').strip()!r:.60}")
    fields = cast("dict[str, Any]", row)
    try:
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a character has no UTF-8
        return Prompt(index, text, prepare(fields))
    except (ValueError, PromptRefused) as error:
        raise ExecutorError(f"{place}: {error}") from None


def as_it_is(row: dict[str, Any]) -> Row:
    """Return the row: agents of one's own know what it means."""
    return row


def for_gym(sampling: SamplingOptions) -> Prepare:
    """Return what makes Gym's rows: of those that are none yet, by `prepare_data`."""

    def prepare(row: dict[str, Any]) -> Row:
        if "responses_create_params" in row:
            if not isinstance(row["responses_create_params"], dict):
                raise ValueError("responses_create_params: must be an object")
            return row
        if wrong := [name for name in ("question", "expected_answer") if not isinstance(row.get(name), str)]:
            raise ValueError(
                f"{wrong[0]}: must be a string; NeMo Gym's rows have either responses_create_params, or question and "
                "expected_answer"
            )
        return {**row, **prepare_data(row["question"], row["expected_answer"], sampling)}

    return prepare
