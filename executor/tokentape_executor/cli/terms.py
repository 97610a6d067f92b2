"""What all rollouts in one file of results have in common: the options that decide what is sampled, and by what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tokentape_executor.cli.arguments import RunOptions
from tokentape_executor.cli.parser import GYM

Terms: TypeAlias = Mapping[str, Any]
"""Values, as JSON has them, by the option or the variable that says them; `None` where it was left out."""

_MODEL = "--model"


def terms_of(options: RunOptions) -> dict[str, Any]:
    """Return the terms of a run. Those that only say how long, how often or where it may run are none."""
    settings, sampling = options.settings, options.sampling
    by_gym = {
        "--gym-agent": settings.gym_agent,
        "TOKENTAPE_GYM_CONFIGS": list(settings.gym_configs),
        "TOKENTAPE_GYM_OVERRIDES": list(settings.gym_overrides),
    }
    return {
        _MODEL: None if options.model is None else Path(options.model).resolve().name,
        "--agent": options.agent.rpartition("/")[2],
        "--temperature": sampling.temperature,
        "--top-p": sampling.top_p,
        "--max-tokens": sampling.max_tokens,
        "--max-context-tokens": options.max_context_tokens,
        "--max-turns": settings.max_turns,
        "--max-weight-changes": settings.max_weight_changes,
        "TOKENTAPE_MAX_SAMPLED": settings.max_sampled_tokens,
        "TOKENTAPE_KEEP_REASONING": settings.keep_reasoning,
        **(by_gym if options.agent == GYM else {}),
    }


def differences(before: Terms, now: Terms) -> str:
    """Return how two runs' terms differ, in words; "" where they do not.

    A run with `--sidecar` does not know the model's directory, and may go on with one that had `--model`.
    """
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if None in {before.get(_MODEL), now.get(_MODEL)}:
        names = [name for name in names if name != _MODEL]
    return ", ".join(f"{name} was {_told(before.get(name))} and is now {_told(now.get(name))}" for name in names)


def _told(value: object) -> str:
    return "left out" if value is None else json.dumps(value)
