"""`tokentape-rollout PROMPTS -o FILE`: every prompt through an executor, as often as wanted, whatever interrupts it.

A row is written as soon as its rollout has ended, with nothing awaited in between; what is interrupted before leaves no
row. Errors of single rollouts are rows. Errors that no rollout can help end the run, and what has no row yet is left to
the next one: the policy is gone, or the file cannot be written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tokentape_executor.cli.agents import load_agent, make_executor
from tokentape_executor.cli.arguments import RunOptions
from tokentape_executor.cli.interruption import Interruption
from tokentape_executor.cli.journal import Journal, Pair, cut_torn_line
from tokentape_executor.cli.parser import GYM
from tokentape_executor.cli.policy import RunPolicy, running_policy
from tokentape_executor.cli.pool import Recorded, recorded
from tokentape_executor.cli.progress import Progress
from tokentape_executor.cli.prompts import Prompt, as_it_is, for_gym, read_prompts
from tokentape_executor.cli.row import result_row
from tokentape_executor.cli.summary import ThisRun, Totals, summary
from tokentape_executor.cli.terms import terms_of
from tokentape_executor.errors import ExecutorError
from tokentape_executor.executor import TapeExecutor, TapeOptions
from tokentape_executor.rollout import Rollout
from tokentape_executor.sampling_policy import sampling_policy
from tokentape_executor.tape_file import StoredTape, append_tape

_CANCEL_SECONDS = 1.0
"""How long rollouts may take to seal their tapes when the run ends early."""


def run(options: RunOptions, console: Console) -> int:
    """Run the command and return its exit status. Raises `ExecutorError` where it does not come to rollouts."""
    messages = Console(stderr=True)
    interruption = Interruption(messages.show_cursor)
    with interruption.listening():
        agent = None if options.agent == GYM else load_agent(options.agent)
        prompts = read_prompts(options.prompts, for_gym(options.sampling) if agent is None else as_it_is)
        totals = Totals()
        terms = terms_of(options)
        journal = Journal.open(options.output, prompts, terms, retry_failed=options.retry_failed, seen=totals.add)
        with contextlib.closing(journal):
            if options.tapes is not None:
                options.tapes.parent.mkdir(parents=True, exist_ok=True)
                cut_torn_line(options.tapes)
            this = _Run(options, agent, prompts, journal, totals=totals, messages=messages)
            asyncio.run(this.main(interruption))
            if not this.left:
                journal.sort()
            return this.close(console, interruption.status)


class _Run:
    """One run of the command."""

    def __init__(
        self,
        options: RunOptions,
        agent: type[TapeExecutor] | None,
        prompts: Sequence[Prompt],
        journal: Journal,
        *,
        totals: Totals,
        messages: Console,
    ) -> None:
        self._options = options
        self._agent = agent
        self._journal = journal
        self._totals = totals
        self._messages = messages
        wanted = [(prompt, sample) for prompt in prompts[: options.limit] for sample in range(options.samples)]
        self._todo = [(prompt, sample) for prompt, sample in wanted if Pair(prompt.index, sample) not in journal.pairs]
        self._before = totals.rollouts
        self._wanted = self._before + len(self._todo)
        self._progress = Progress(messages, totals, self._wanted)
        self._seconds = 0.0
        self._problem: ExecutorError | None = None
        """What has ended the run early."""

    @property
    def left(self) -> int:
        """How many rollouts have no row yet."""
        return self._wanted - self._totals.rollouts

    async def main(self, interruption: Interruption) -> None:
        """Run what is left to run, until it is done, interrupted, or of no use. Raises where it does not start."""
        if not self._todo:
            return
        async with self._progress.shown():
            working = asyncio.create_task(self._work())
            interrupted = asyncio.create_task(interruption.wait())
            await asyncio.wait({working, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._progress.note = "interrupted: stopping; once more to quit at once"
                working.cancel()
            interrupted.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working

    def close(self, console: Console, interrupted: int | None) -> int:
        """Show how the run went, and return the exit status. `interrupted`: that of a signal, if one came."""
        done_now = self._totals.rollouts - self._before
        console.print(
            summary(self._totals, self._wanted, ThisRun(done_now, self._progress.tokens.total, self._seconds))
        )
        output = self._options.output
        if self._problem is not None:
            print(f"tokentape-rollout: {self._problem}", file=sys.stderr)  # noqa: T201 - a command's own output
        if self.left:
            there = f"{self._totals.rollouts} of {self._wanted} rollouts are in {output}"
            console.print(Text(f"{there}; run the same command again to continue", "yellow"), soft_wrap=True)
        elif self._totals.failed:
            console.print(Text(f"{self._totals.failed} failed: run them again with --retry-failed", "yellow"))
        if interrupted is not None:
            return interrupted
        return 2 if self._problem is not None else int(bool(self._totals.failed))

    async def _work(self) -> None:
        async with running_policy(self._options, self._report, self._progress.tokens.add) as policy:
            executor = make_executor(self._options, self._agent, policy)
            self._report("")
            started = time.monotonic()
            try:
                await self._all(executor, policy)
            except ExecutorError as error:
                self._problem = error
            finally:
                self._seconds = time.monotonic() - started

    async def _all(self, executor: TapeExecutor, policy: RunPolicy) -> None:
        """Run the rollouts, as many at a time as wanted, while there is a policy. Raises what ends the run."""
        todo = iter(self._todo)
        workers = {
            asyncio.create_task(self._worker(todo, executor, policy))
            for _ in range(min(self._options.concurrency, len(self._todo)))
        }
        keeping = asyncio.create_task(policy.keep())
        try:
            while workers:
                done, _ = await asyncio.wait({*workers, keeping}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                workers -= done
        finally:
            await _cancel({*workers, keeping})

    async def _worker(self, todo: Iterator[tuple[Prompt, int]], executor: TapeExecutor, policy: RunPolicy) -> None:
        for prompt, sample_index in todo:
            self._progress.running += 1
            try:
                await self._one(prompt, sample_index, executor, policy)
            finally:
                self._progress.running -= 1

    async def _one(self, prompt: Prompt, sample_index: int, executor: TapeExecutor, policy: RunPolicy) -> None:
        started = time.monotonic()
        tapes: Recorded = {}
        recorded.set(tapes if self._options.tapes is not None else None)
        (result,) = await executor.rollouts(
            [prompt.task],
            sampling_policy=sampling_policy(self._options.sampling),
            max_context_tokens=self._options.max_context_tokens,
            options=TapeOptions(keep_reasoning=self._options.settings.keep_reasoning),
        )
        if isinstance(result, Rollout) and self._options.tapes is not None:
            _keep_tape(self._options.tapes, policy.tapes.stored(result.tape_id, tapes[result.tape_id]))
        row = result_row(
            prompt, sample_index, result, terms=terms_of(self._options), seconds=time.monotonic() - started
        )
        self._journal.append(row)
        self._totals.add(row)

    def _report(self, note: str) -> None:
        """Show what is being done."""
        self._progress.note = note
        if note and not self._messages.is_terminal:
            self._messages.print(Text(note), soft_wrap=True)


def _keep_tape(file: Path, tape: StoredTape) -> None:
    """Append the tape, whole. Raises `ExecutorError`, with nothing added, where that fails."""
    end = file.stat().st_size if file.exists() else 0
    try:
        append_tape(file, tape)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.truncate(file, end)
        raise ExecutorError(f"--tapes: cannot write to {file}: {error.strerror}") from None


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel the tasks and wait for their end, as long as is decent."""
    for task in tasks:
        task.cancel()
    ended, _ = await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
    for task in ended:
        if not task.cancelled():
            task.exception()  # the first one's is raised
