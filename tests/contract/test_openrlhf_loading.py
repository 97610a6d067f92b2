"""OpenRLHF's own `_load_agent_executor` on our file, and on a user's, in a process in which OpenRLHF is installed."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.openrlhf_wheel import VERSION, openrlhf_directory
from tokentape_executor import openrlhf

__all__ = ["openrlhf_directory"]

LOAD = """
import inspect, json, sys
import cloudpickle
from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
from openrlhf.utils.agent import AgentExecutorBase

executor = _load_agent_executor(sys.argv[1])
again = cloudpickle.loads(cloudpickle.dumps(executor))
print(json.dumps({
    "base": inspect.getfile(AgentExecutorBase),
    "is_one": [isinstance(each, AgentExecutorBase) for each in (executor, again)],
    "agent": getattr(executor.agent, "__name__", None),
    "ours": list(inspect.signature(executor.execute).parameters),
    "theirs": list(inspect.signature(AgentExecutorBase.execute).parameters)[1:],
}))
"""


def loaded(file: Path, openrlhf_directory: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, str(file)],
        env={**os.environ, "PYTHONPATH": str(openrlhf_directory)},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("file", "agent"),
    [(Path(inspect.getfile(openrlhf)), None), (Path("executor/examples/openrlhf_agent.py"), "SecondThought")],
)
def test_openrlhf_loads_the_file(file: Path, agent: str | None, checkout: Path, openrlhf_directory: Path) -> None:
    got = loaded(checkout / file, openrlhf_directory)
    assert got["base"] == str(openrlhf_directory / "openrlhf" / "utils" / "agent.py")
    assert got["is_one"] == [True, True]
    assert got["agent"] == agent
    assert got["ours"] == got["theirs"]


def test_the_option_that_a_refused_prompt_names_is_openrlhfs(openrlhf_directory: Path) -> None:
    command = (openrlhf_directory / "openrlhf" / "cli" / "train_ppo_ray.py").read_text()
    assert '"--data.apply_chat_template"' in command
    assert '"--train.agent_func_path"' in command
    assert VERSION in str(openrlhf_directory)
