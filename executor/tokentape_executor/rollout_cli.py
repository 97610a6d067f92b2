"""`tokentape-rollout`: what can be done with the tapes of rollouts, away from the engine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokentape.v1 import generation_pb2
from tokentape_executor.errors import ExecutorError
from tokentape_executor.oracle import LogprobsMode, score
from tokentape_executor.oracle_report import DEFAULT_TOLERANCE, OracleError, OracleReport, Tolerance
from tokentape_executor.tape_file import StoredTape, read_tapes
from tokentape_executor.tape_script import to_script
from tokentape_executor.trajectory import Trajectory

_EPILOG = """\
examples:
  # are the recorded log-probabilities the model's? exit status 1 if not
  tokentape-rollout --verify tapes.jsonl --model ./SmolLM2-135M-Instruct

  # rollouts of a training run: only those of this checkpoint's weights, and no complaint about the rest
  tokentape-rollout --verify tapes.jsonl --model ./checkpoint-40 --weight-version 40 --skip-refused

  # the first tape as a script, then the same rollout again without a model
  tokentape-rollout --script tapes.jsonl --tape 0 -o script.json
  tokentape-sidecar --engine scripted --script script.json --tokenizer ./SmolLM2-135M-Instruct

docs/tape-file.md says how tapes are stored. Differences are |recorded - recomputed| log-probabilities, in nats.
"""

_MODES = {
    generation_pb2.LOGPROBS_MODE_RAW: LogprobsMode.RAW,
    generation_pb2.LOGPROBS_MODE_PROCESSED: LogprobsMode.PROCESSED,
}
_PLAIN_WIDTH = 120


@dataclass(frozen=True, slots=True)
class _Options:
    """What the command was told; see `--help`."""

    verify: Path | None
    script: Path | None
    model: Path | None
    tolerance: float
    mean_tolerance: float
    dtype: str
    weight_version: list[str] | None
    skip_refused: bool
    tape: int
    output: Path | None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokentape-rollout",
        description="Verify the rollouts of a file of tapes against a model, or write a tape as a script.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--verify", type=Path, metavar="TAPES", help="re-score every sample of these tapes with --model")
    mode.add_argument("--script", type=Path, metavar="TAPES", help="write one of these tapes as a script")
    verify = parser.add_argument_group("with --verify")
    verify.add_argument("--model", type=Path, metavar="DIR", help="the checkpoint, for transformers")
    verify.add_argument(
        "--tolerance",
        type=float,
        default=DEFAULT_TOLERANCE.largest,
        metavar="NATS",
        help="the largest difference that passes at any token (default: %(default)s, for bfloat16 at temperature 1)",
    )
    verify.add_argument(
        "--mean-tolerance",
        type=float,
        default=DEFAULT_TOLERANCE.mean,
        metavar="NATS",
        help="the largest mean difference of any sample that passes (default: %(default)s)",
    )
    verify.add_argument(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="the model's precision, as in float32 (default: the checkpoint's)",
    )
    verify.add_argument(
        "--weight-version",
        action="append",
        metavar="V",
        help="a recorded version that is the model's weights; repeatable (default: the tapes' only one)",
    )
    verify.add_argument(
        "--skip-refused",
        action="store_true",
        help="pass although tokens cannot be compared: of other versions, of a stale cache, of penalties",
    )
    script = parser.add_argument_group("with --script")
    script.add_argument("--tape", type=int, default=0, metavar="N", help="which tape, from 0 (default: %(default)s)")
    script.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write (default: standard output)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tokentape-rollout` and return its exit status: 0; 1 where tapes do not verify; 2 for what it cannot use."""
    parser = _parser()
    options = _Options(**vars(parser.parse_args(arguments)))
    if options.verify is not None and options.model is None:
        parser.error("--verify needs --model")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    try:
        return _script(options) if options.script is not None else _verify(options, console)
    except (ExecutorError, OSError) as error:
        print(f"tokentape-rollout: {error}", file=sys.stderr)  # noqa: T201 - a command's own output
        return 2


def _script(options: _Options) -> int:
    assert options.script is not None
    tapes = list(read_tapes(options.script))
    if not 0 <= options.tape < len(tapes):
        raise ExecutorError(f"--tape {options.tape}: {options.script} has {len(tapes)} tapes, counted from 0")
    tape = tapes[options.tape]
    text = json.dumps(to_script(tape.entries, tape.model)) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text)
    return 0


def _verify(options: _Options, console: Console) -> int:
    assert options.verify is not None
    assert options.model is not None
    tapes = list(read_tapes(options.verify))
    trajectories = [_assemble(options.verify, index, tape) for index, tape in enumerate(tapes)]
    versions = options.weight_version or _only_version(trajectories)
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
