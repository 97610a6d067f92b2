"""The command line of `tokentape-rollout`: what it says becomes the options of one of three modes."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tokentape.access import Access, access_from
from tokentape.config import split_at_dashes
from tokentape_executor.cli.parser import GYM, ON_FAILURE, make_parser
from tokentape_executor.rollout_client import NO_KEY
from tokentape_executor.settings import ExecutorSettings


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """`--verify`."""

    tapes: Path
    model: Path
    tolerance: float
    mean_tolerance: float
    dtype: str
    weight_versions: list[str] | None
    skip_refused: bool


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """`--script`."""

    tapes: Path
    tape: int
    output: Path | None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What is pinned for every call of every rollout. `None`: the agent's choice, then the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Prompts through an executor."""

    prompts: Path
    output: Path
    sidecars: tuple[str, ...]
    """gRPC addresses of running ones; empty: `model` is served by an own one."""
    access: Access
    """How to get into them."""
    model: str | None
    vllm_options: tuple[str, ...]
    bridge: str | None
    """OpenAI base URL of a running one, with `/v1`."""
    bridge_key: str = field(repr=False)
    """What that one asks for."""
    agent: str
    """`GYM`, or `FILE.py:CLASS`, or `MODULE:CLASS`."""
    samples: int
    """Rollouts per prompt."""
    concurrency: int
    limit: int | None
    """How many prompts of the file are run, from the first."""
    sampling: SamplingOptions
    max_context_tokens: int | None
    tapes: Path | None
    reader_tokens: Path | None
    """Where the tapes' reader tokens are written to."""
    retry_failed: bool
    settings: ExecutorSettings
    """The environment's, changed as the command line says."""


Options: TypeAlias = VerifyOptions | ScriptOptions | RunOptions


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line. Exits with status 2 and a message where it, or a variable of the settings, is wrong."""
    parser = make_parser()
    own, vllm_options = split_at_dashes(parser.with_config(arguments))
    told = parser.parse_args(own)
    if sum(each is not None for each in (told.prompts, told.verify, told.script)) != 1:
        parser.error("give either a file of prompts, or --verify TAPES, or --script TAPES")
    if vllm_options is not None and (told.prompts is None or told.model is None):
        parser.error("options after -- are vLLM's, for prompts with --model")
    if told.verify is not None:
        return _verify_options(parser, told)
    if told.script is not None:
        return ScriptOptions(told.script, told.tape, told.output)
    return _run_options(parser, told, tuple(vllm_options or ()))


def _verify_options(parser: argparse.ArgumentParser, told: argparse.Namespace) -> VerifyOptions:
    if told.model is None:
        parser.error("--verify needs --model")
    return VerifyOptions(
        told.verify,
        Path(told.model),
        told.tolerance,
        told.mean_tolerance,
        told.dtype,
        told.weight_version,
        told.skip_refused,
    )


def _run_options(
    parser: argparse.ArgumentParser, told: argparse.Namespace, vllm_options: tuple[str, ...]
) -> RunOptions:
    problem = _problem(told)
    if problem:
        parser.error(problem)
    try:
        settings = _settings(told, ExecutorSettings.from_environment())
        bridge_key = NO_KEY if told.bridge_key_file is None else _key_in(told.bridge_key_file)
    except ValueError as error:
        parser.error(str(error))
    return RunOptions(
        prompts=told.prompts,
        output=told.output,
        access=access_from(told, parser),
        sidecars=tuple(str(address) for address in told.sidecar),
        model=told.model,
        vllm_options=vllm_options,
        bridge=told.bridge,
        bridge_key=bridge_key,
        agent=told.agent,
        samples=told.samples,
        concurrency=told.concurrency,
        limit=told.limit,
        sampling=SamplingOptions(told.temperature, told.top_p, told.max_tokens),
        max_context_tokens=told.max_context_tokens,
        tapes=told.tapes,
        reader_tokens=told.reader_tokens,
        retry_failed=told.retry_failed,
        settings=settings,
    )


def _problem(told: argparse.Namespace) -> str:
    """Return what is wrong with these options for prompts; empty: nothing."""
    files = [path.resolve() for path in (told.prompts, told.output, told.tapes, told.reader_tokens) if path is not None]
    if told.model is not None and (told.sidecar_token_file or told.sidecar_ca):
        return "--sidecar-token-file and --sidecar-ca are for --sidecar: the one that --model starts needs neither"
    if told.output is None:
        return "-o is needed: the file that the results go to"
    if len(set(files)) < len(files):
        return "the prompts, -o, --tapes and --reader-tokens must be different files"
    if bool(told.sidecar) == (told.model is not None):
        return "give either --sidecar ADDRESS (repeatable) or --model DIR"
    return _agent_problem(told)


def _agent_problem(told: argparse.Namespace) -> str:
    if told.agent != GYM and not all(told.agent.rpartition(":")):
        return f"--agent: {told.agent!r} is neither {GYM} nor FILE.py:CLASS nor MODULE:CLASS"
    if told.bridge is not None and told.agent == GYM:
        return f"--bridge is for agents of your own: NeMo Gym (--agent {GYM}) has a bridge started for it"
    if told.bridge_key_file is not None and told.bridge is None:
        return "--bridge-key-file needs --bridge: a bridge that is started here asks for no key"
    if told.bridge is not None and not told.sidecar:
        return "--bridge needs --sidecar: a running bridge does not know the sidecar that --model starts"
    return ""


def _key_in(file: Path) -> str:
    """Return the first key of a file that has one a line, as the bridge's. Raises `ValueError` where it has none."""
    try:
        keys = file.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--bridge-key-file {file}: cannot be read: {error}") from None
    if not keys:
        raise ValueError(f"--bridge-key-file {file}: there is no key in it")
    return keys[0]


def _settings(told: argparse.Namespace, settings: ExecutorSettings) -> ExecutorSettings:
    """Return the settings with what the command line says otherwise."""
    changes = {
        "gym_agent": told.gym_agent,
        "max_turns": told.max_turns,
        "max_weight_changes": told.max_weight_changes,
        "rollout_timeout_seconds": told.rollout_timeout,
        "turn_timeout_seconds": told.turn_timeout,
        "retries": told.retries,
        "on_failure": None if told.on_failure is None else ON_FAILURE[told.on_failure],
    }
    return dataclasses.replace(settings, **{name: value for name, value in changes.items() if value is not None})
