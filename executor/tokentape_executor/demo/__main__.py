"""`python -m tokentape_executor.demo`: three math questions through NeMo Gym, bridge, sidecar and vLLM.

Exits with 0 when every rollout gave a result, 1 when something failed, 128 + n after signal n. Whatever happens, the
processes that it started end before it does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from tokentape_executor.demo import show
from tokentape_executor.demo.line import Line
from tokentape_executor.demo.questions import QUESTIONS, Question
from tokentape_executor.demo.steps import Steps
from tokentape_executor.demo.transcript import Transcript
from tokentape_executor.errors import RolloutError, StartFailed
from tokentape_executor.gym_executor import NemoGymExecutor
from tokentape_executor.openrlhf_result import openrlhf_result
from tokentape_executor.prepare import prepare_data
from tokentape_executor.sampling_policy import sampling_policy
from tokentape_executor.services import ServiceGroup

_PLAIN_WIDTH = 110
"""Columns where the output is no terminal and has no width of its own."""
_MAX_CONTEXT_TOKENS = 512
_SIGNALLED = 128
"""What is added to a signal's number in an exit status, as shells do."""


@dataclass(frozen=True, slots=True)
class _Sampling:
    """How the demo samples: warm enough for surprises, short enough for a processor without a GPU."""

    temperature: float = 0.7
    top_p: float = 0.95
    max_tokens: int = 96


@dataclass(frozen=True, slots=True)
class _Options:
    model: Path
    output: Path
    logs: Path


def _parse_options(arguments: Sequence[str] | None) -> _Options:
    parser = argparse.ArgumentParser(prog="python -m tokentape_executor.demo", description=__doc__)
    parser.add_argument(
        "--model",
        type=Path,
        default=Path(".cache/SmolLM2-135M-Instruct"),
        metavar="DIR",
        help="the checkpoint to sample from (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("out/demo.jsonl"),
        metavar="FILE",
        help="where the results go, a JSON object a line (default: %(default)s)",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        default=Path("out/logs"),
        metavar="DIR",
        help="where the processes' logs go (default: %(default)s)",
    )
    options = _Options(**vars(parser.parse_args(arguments)))
    if not (options.model / "tokenizer.json").is_file():
        parser.error(
            f"no model in {options.model}; to build it: python -m tokentape_executor.demo.model {options.model}"
        )
    return options


async def _one(executor: NemoGymExecutor, question: Question, tokenizer: Tokenizer) -> Transcript | RolloutError:
    """Run one rollout; a failed one is data, and leaves the others alone."""
    try:
        rollout = await executor.rollout(
            prepare_data(question.prompt, question.label, _Sampling()),
            sampling_policy=sampling_policy(_Sampling()),
            max_context_tokens=_MAX_CONTEXT_TOKENS,
        )
        result = openrlhf_result(rollout, prompt=question.prompt, label=question.label)
    except RolloutError as error:
        return error
    return Transcript.from_result(result, tokenizer, tape_id=rollout.tape_id)


async def _demo(options: _Options, console: Console) -> int:
    """Run the demo and return its exit status. Ends the processes also when it is cancelled."""
    steps = Steps(console)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    group = ServiceGroup(options.logs)
    try:
        async with Line(options.model, options.logs).started(group, steps) as executor:
            started = time.monotonic()
            with steps.step(f"{len(QUESTIONS)} rollouts are running", f"{len(QUESTIONS)} rollouts have run"):
                results = await asyncio.gather(*(_one(executor, question, tokenizer) for question in QUESTIONS))
            seconds = time.monotonic() - started
    except StartFailed as error:
        console.print(Text(str(error), "red"))
        return 1
    finally:
        with steps.step("stopping every process", "every process has ended"):
            await asyncio.to_thread(group.stop)
    _show(console, results, seconds)
    _write(options.output, results)
    console.print(
        Text.assemble("results in ", (str(options.output), "bold"), ", logs in ", (str(options.logs), "bold"))
    )
    return int(any(isinstance(result, RolloutError) for result in results))


def _show(console: Console, results: Sequence[Transcript | RolloutError], seconds: float) -> None:
    colours = console.color_system is not None
    console.print()
    console.print(show.legend(console), "\n")
    for number, (question, result) in enumerate(zip(QUESTIONS, results, strict=True), 1):
        if isinstance(result, RolloutError):
            console.print(show.failure_panel(number, question.prompt, result))
        else:
            console.print(show.rollout_panel(number, result, colours=colours))
    console.print()
    console.print(show.summary([result for result in results if isinstance(result, Transcript)], seconds))


def _write(path: Path, results: Sequence[Transcript | RolloutError]) -> None:
    """Write a JSON object per rollout: the transcript, or prompt, label and error of one that failed."""
    lines: list[dict[str, Any]] = [
        result.to_json()
        if isinstance(result, Transcript)
        else {"prompt": question.prompt, "label": question.label, "error": f"{type(result).__name__}: {result}"}
        for question, result in zip(QUESTIONS, results, strict=True)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


async def _until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Return what `work` returns; on SIGINT, SIGTERM or SIGHUP cancel it, wait for its end, and return 128 + n.

    Further signals change nothing: what is left to do by then is to end processes, and has its own time limit.
    """
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def cancel(number: int) -> None:
        if not received:
            task.cancel()
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, cancel, number)
    try:
        return await task
    except asyncio.CancelledError:
        return _SIGNALLED + received[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo as the command line says and return the exit status."""
    options = _parse_options(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    console.print(
        Text("tokentape", "bold"), "· question → NeMo Gym → bridge → sidecar → vLLM → tape → sample", style="dim"
    )
    status = asyncio.run(_until_signal(_demo(options, console)))
    if status > _SIGNALLED:
        console.print(Text(f"interrupted by {signal.Signals(status - _SIGNALLED).name}; no results", "yellow"))
    return status


if __name__ == "__main__":
    sys.exit(main())
