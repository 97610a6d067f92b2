"""`tokentape-rollout --verify`: every sample of a file of tapes, re-scored by a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokentape.v1 import generation_pb2
from tokentape_executor.cli.arguments import VerifyOptions
from tokentape_executor.errors import ExecutorError
from tokentape_executor.oracle import LogprobsMode, score
from tokentape_executor.oracle_report import OracleError, OracleReport, Tolerance
from tokentape_executor.tape_file import StoredTape, read_tapes
from tokentape_executor.trajectory import Trajectory

_MODES = {
    generation_pb2.LOGPROBS_MODE_RAW: LogprobsMode.RAW,
    generation_pb2.LOGPROBS_MODE_PROCESSED: LogprobsMode.PROCESSED,
}


def verify(options: VerifyOptions, console: Console) -> int:
    """Print the table and what is wrong; return 0, or 1 where the tapes do not verify. Raises `ExecutorError`."""
    tapes = list(read_tapes(options.tapes))
    trajectories = [_assemble(options.tapes, index, tape) for index, tape in enumerate(tapes)]
    versions = options.weight_versions or _only_version(trajectories)
    model, tokenizer = _load(options.model, options.dtype)
    tolerance = Tolerance(options.tolerance, options.mean_tolerance)
    table = _table()
    problems: list[str] = []
    compared = 0
    for index, (tape, trajectory) in enumerate(zip(tapes, trajectories, strict=True)):
        report = score(
            trajectory.samples,
            model,
            logprobs_mode=_mode(tape),
            weight_versions=versions,
            tokenizer=tokenizer,
            stop_token_ids=tape.model.eos_token_ids,
        )
        compared += report.compared
        problems += [f"tape {index}, {problem}" for problem in _problems(report, tolerance, options.skip_refused)]
        _add_rows(table, index, trajectory, report, tolerance)
    if not compared:
        problems.append("no token could be compared")
    console.print(table)
    for problem in problems:
        console.print(Text(problem, "red"))
    if not problems:
        console.print(Text(f"passed: {compared} tokens, none off by more than {tolerance.largest} nats", "green"))
    return int(bool(problems))


def _assemble(file: Path, index: int, tape: StoredTape) -> Trajectory:
    try:
        return tape.trajectory()
    except ExecutorError as error:
        raise ExecutorError(f"{file}: tape {index}: {error}") from None


def _only_version(trajectories: Sequence[Trajectory]) -> list[str]:
    """Return the one version that the tapes have; [] where nothing was sampled."""
    seen = sorted({version for trajectory in trajectories for version in trajectory.receipt.weight_versions})
    if len(seen) > 1:
        raise ExecutorError(f"the tapes have the weight versions {seen}: say with --weight-version which the model has")
    return seen


def _mode(tape: StoredTape) -> LogprobsMode:
    mode = _MODES.get(tape.model.logprobs_mode)
    if mode is None:
        raise ExecutorError("a tape does not say of which distribution its log-probabilities are (logprobs_mode)")
    return mode


def _load(directory: Path, dtype: str) -> tuple[Any, Any]:
    """Return the model, on a GPU if there is one, and its tokenizer."""
    # transformers would look for a repository of that name on a model hub.
    if not directory.is_dir():
        raise ExecutorError(f"--model: there is no directory {directory}")
    try:
        import torch  # noqa: PLC0415 - seconds, and not needed for anything else
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise ExecutorError(f"--verify needs the package {missing.name}: pip install torch transformers") from None
    models: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = models.from_pretrained(str(directory), dtype=dtype).to(device).eval()
        return model, tokenizers.from_pretrained(str(directory))
    except (OSError, ValueError) as error:
        raise ExecutorError(f"--model {directory}: {error}") from None


def _problems(report: OracleReport, tolerance: Tolerance, skip_refused: bool) -> list[str]:
    problems = [] if skip_refused else [f"{each}; not compared" for each in report.refusals]
    try:
        report.check(tolerance)
    except OracleError as error:
        problems.append(str(error))
    return problems


def _table() -> Table:
    table = Table(title="|recorded - recomputed| log-probability, in nats")
    for name in ("tape", "sample", "split", "tokens", "compared", "refused", "mean", "max", "at position"):
        table.add_column(name, justify="left" if name == "split" else "right")
    return table


def _add_rows(table: Table, index: int, trajectory: Trajectory, report: OracleReport, tolerance: Tolerance) -> None:
    for sample, found in zip(trajectory.samples, report.samples, strict=True):
        beyond = found.largest > tolerance.largest or found.mean > tolerance.mean
        table.add_row(
            str(index),
            str(found.sample),
            sample.split_cause.value,
            str(len(sample.tokens)),
            str(len(found.positions)),
            str(sample.action_token_count - len(found.positions)),
            f"{found.mean:.4f}",
            f"{found.largest:.4f}",
            "" if found.worst_position is None else str(found.worst_position),
            style="red" if beyond else None,
        )
