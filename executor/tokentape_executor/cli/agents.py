"""Agents of one's own, by name: `FILE.py:CLASS` or `MODULE:CLASS`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType

from tokentape_executor.cli.arguments import RunOptions
from tokentape_executor.cli.policy import RunPolicy
from tokentape_executor.errors import ExecutorError
from tokentape_executor.executor import RolloutLimits, TapeExecutor
from tokentape_executor.gym_executor import NemoGymExecutor


def load_agent(name: str) -> type[TapeExecutor]:
    """Return the class that `name` names.

    Modules beside FILE, or in the working directory, can be imported, as for `python FILE` and `python -m`.
    Raises `ExecutorError` where there is none, it cannot be imported, or it is no `TapeExecutor` that can be made.
    """
    place, _, class_name = name.rpartition(":")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    except Exception as error:
        # Whatever the agent's own code raises; its place is worth more than our own frames.
        raise ExecutorError(f"--agent {name}: cannot be imported: {_told(error)}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not issubclass(found, TapeExecutor):
        what = "is not there" if found is None else "is no class that extends tokentape_executor.executor.TapeExecutor"
        raise ExecutorError(f"--agent {name}: {class_name} {what}")
    if missing := sorted(found.__abstractmethods__):
        raise ExecutorError(f"--agent {name}: {class_name} does not define {', '.join(missing)}")
    _check_signature(name, found)
    return found


def _from_file(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or specification is None or specification.loader is None:
        raise FileNotFoundError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module  # where dataclasses and pickle look for it
    specification.loader.exec_module(module)
    return module


def _from_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _told(error: Exception) -> str:
    """Return the error with the line that raised it."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    return f"{own[-1].filename}:{own[-1].lineno}: {text}" if own else text


def _check_signature(name: str, found: type[TapeExecutor]) -> None:
    """Raise `ExecutorError` where the class cannot be made as `TapeExecutor` is."""
    try:
        inspect.signature(found).bind(object(), limits=None, retries=0, on_failure=None)
    except TypeError as error:
        raise ExecutorError(f"--agent {name}: __init__ must take what TapeExecutor's takes: {error}") from None


def make_executor(options: RunOptions, agent: type[TapeExecutor] | None, policy: RunPolicy) -> TapeExecutor:
    """Return what runs the rollouts: `agent`, or that of the policy's NeMo Gym (`None`)."""
    settings = options.settings
    limits = RolloutLimits.from_settings(settings)
    if agent is not None:
        return agent(policy, limits=limits, retries=settings.retries, on_failure=settings.on_failure)
    assert policy.gym is not None
    return NemoGymExecutor(
        policy,
        policy.gym,
        default_agent=settings.gym_agent,
        limits=limits,
        retries=settings.retries,
        on_failure=settings.on_failure,
    )
