"""Settings of the executor, read once from the environment.

| variable                     | meaning                                            | default                     |
|------------------------------|----------------------------------------------------|-----------------------------|
| TOKENTAPE_GYM_VENV           | virtual environment with nemo-gym 0.4 or newer     | `.venv-gym` beside this one |
| TOKENTAPE_GYM_CONFIGS        | Gym's configuration files, separated by commas     | math_with_judge, vllm_model |
| TOKENTAPE_GYM_OVERRIDES      | changes to them, Hydra's, split as in a shell      | none                        |
| TOKENTAPE_GYM_AGENT          | the agent that runs rows without an `agent_ref`    | its simple agent            |
| TOKENTAPE_GYM_URL            | head server of a running Gym to use instead        | none: one is started        |
| TOKENTAPE_NODE_GROUP         | executors of one group on a node share its Gym and | in Ray: the job; else each  |
|                              | bridge                                             | process has its own         |
| TOKENTAPE_BRIDGE_OPTIONS     | more of `tokentape-bridge --help`, as in a shell   | none                        |
| TOKENTAPE_START_TIMEOUT      | seconds that each process may take to be ready     | 120                         |
| TOKENTAPE_ROLLOUT_TIMEOUT    | seconds that one rollout may take; 0: no limit     | 0                           |
| TOKENTAPE_TURN_TIMEOUT       | seconds from one call's end to the next; 0: none   | 0                           |
| TOKENTAPE_MAX_TURNS          | most calls of one rollout; 0: no limit             | 0                           |
| TOKENTAPE_MAX_SAMPLED        | most tokens sampled in one rollout; 0: no limit    | 0                           |
| TOKENTAPE_MAX_WEIGHT_CHANGES | most changes of the weights that a call may live   | any number                  |
|                              | through after its first token; 0: none             |                             |
| TOKENTAPE_KEEP_REASONING     | 1: later prompts keep reasoning that the template  | 0                           |
|                              | would strip                                        |                             |
| TOKENTAPE_RETRIES            | how often a failed rollout is run again            | 2                           |
| TOKENTAPE_ON_FAILURE         | then `raise`, or `placeholder`: a sample of one    | raise                       |
|                              | token, flagged                                     |                             |
| TOKENTAPE_TAPE_KEEPING       | seconds that the sidecar keeps a rollout's tape    | 60                          |
| TOKENTAPE_LOG_DIR            | where the processes' logs go; they are kept there  | a temporary directory       |
"""

from __future__ import annotations

import enum
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

GYM_CONFIGS = (
    "resources_servers/math_with_judge/configs/math_with_judge.yaml",
    "responses_api_models/vllm_model/configs/vllm_model.yaml",
)
"""The environment that runs by default: math problems, checked by math-verify, and the policy behind the bridge."""

GYM_AGENT = "math_with_judge_simple_agent"
"""The agent of that environment."""


class OnFailure(enum.Enum):
    """What becomes of a rollout that failed every time it was run."""

    RAISE = "raise"
    """The last error is raised."""
    PLACEHOLDER = "placeholder"
    """One token is sampled from the rollout's prompt and stands for it, with reward 0 and a flag."""


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """How the executor starts what it needs, and how long it waits."""

    gym_venv: Path = field(default_factory=lambda: Path(sys.prefix).with_name(".venv-gym"))
    """Virtual environment with nemo-gym, which wants another Python than the engine. Default: the Makefile's."""
    gym_configs: tuple[str, ...] = GYM_CONFIGS
    """NeMo Gym's configuration files, absolute or relative to its installation."""
    gym_overrides: tuple[str, ...] = ()
    """What they shall say otherwise, in Hydra's words, such as
    `++math_with_judge_simple_agent.responses_api_agents.simple_agent.max_steps=3`."""
    gym_agent: str = GYM_AGENT
    """The agent that runs rows which name none."""
    gym_url: str | None = None
    """`http://HOST:PORT` of the head server of a running Gym; none is started then, and `gym_venv`, `gym_configs` and
    `gym_overrides` say nothing."""
    node_group: str | None = None
    """Executors of one group (and one user and one machine) share a bridge and a Gym. `None`: those of a Ray job do,
    and outside Ray each process has its own."""
    bridge_options: tuple[str, ...] = ()
    """More options of `tokentape-bridge`."""
    start_timeout_seconds: float = 120.0
    """How long each process may take to be ready."""
    rollout_timeout_seconds: float | None = None
    """How long one rollout may take before it fails; `None`: as long as the agent needs."""
    turn_timeout_seconds: float | None = None
    """How long one turn may take, from a call's end (or the rollout's start) to the next call's end (or the
    rollout's), before the rollout fails; `None`: as long as the agent needs."""
    max_turns: int | None = None
    """Most calls of one rollout; later ones are refused. `None`: any number."""
    max_sampled_tokens: int | None = None
    """Most tokens sampled in one rollout. `None`: any number."""
    max_weight_changes: int | None = None
    """Most changes of the weights that a call may live through after its first token; 0: none. `None`: any number."""
    keep_reasoning: bool = False
    """Whether later prompts keep reasoning that the chat template would strip."""
    retries: int = 2
    """How often a failed rollout is run again, from its start and on a new tape."""
    on_failure: OnFailure = OnFailure.RAISE
    """What becomes of it after that."""
    tape_time_to_live_seconds: float = 60.0
    """How long the sidecar keeps a tape after its last call and its last reader."""
    log_directory: Path | None = None
    """Where logs of the processes go. `None`: a temporary directory that goes when the executor shuts down."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the variables above; raises `ValueError`, naming the variable, where one is malformed."""
        configs = environment.get("TOKENTAPE_GYM_CONFIGS", "")
        log_directory = environment.get("TOKENTAPE_LOG_DIR", "")
        return cls(
            gym_venv=Path(environment.get("TOKENTAPE_GYM_VENV") or Path(sys.prefix).with_name(".venv-gym")),
            gym_configs=tuple(path.strip() for path in configs.split(",")) if configs else GYM_CONFIGS,
            gym_overrides=_words(environment, "TOKENTAPE_GYM_OVERRIDES"),
            gym_agent=environment.get("TOKENTAPE_GYM_AGENT") or GYM_AGENT,
            gym_url=environment.get("TOKENTAPE_GYM_URL") or None,
            node_group=environment.get("TOKENTAPE_NODE_GROUP") or None,
            bridge_options=_words(environment, "TOKENTAPE_BRIDGE_OPTIONS"),
            start_timeout_seconds=_seconds(environment, "TOKENTAPE_START_TIMEOUT") or 120.0,
            rollout_timeout_seconds=_seconds(environment, "TOKENTAPE_ROLLOUT_TIMEOUT"),
            turn_timeout_seconds=_seconds(environment, "TOKENTAPE_TURN_TIMEOUT"),
            max_turns=_count(environment, "TOKENTAPE_MAX_TURNS") or None,
            max_sampled_tokens=_count(environment, "TOKENTAPE_MAX_SAMPLED") or None,
            max_weight_changes=_count(environment, "TOKENTAPE_MAX_WEIGHT_CHANGES"),
            keep_reasoning=bool(_count(environment, "TOKENTAPE_KEEP_REASONING")),
            retries=2 if (retries := _count(environment, "TOKENTAPE_RETRIES")) is None else retries,
            on_failure=_on_failure(environment, "TOKENTAPE_ON_FAILURE"),
            tape_time_to_live_seconds=_seconds(environment, "TOKENTAPE_TAPE_KEEPING") or 60.0,
            log_directory=Path(log_directory) if log_directory else None,
        )


def _words(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the words of a variable, split and quoted as in a shell."""
    try:
        return tuple(shlex.split(environment.get(name, "")))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _seconds(environment: Mapping[str, str], name: str) -> float | None:
    """Return a positive number of seconds; `None` where it is absent, empty or 0."""
    text = environment.get(name, "")
    try:
        seconds = float(text or 0)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is not a number of seconds") from None
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name}: {text!r} is not a number of seconds")
    return seconds or None


def _count(environment: Mapping[str, str], name: str) -> int | None:
    """Return a number, 0 or more; `None` where it is absent or empty."""
    text = environment.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name}: {text!r} is not a number, 0 or more")
    return int(text)


def _on_failure(environment: Mapping[str, str], name: str) -> OnFailure:
    text = environment.get(name) or OnFailure.RAISE.value
    try:
        return OnFailure(text)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is neither raise nor placeholder") from None
