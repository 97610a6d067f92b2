"""The options of `tokentape-rollout`, for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tokentape.access import add_access_options
from tokentape.config import ConfigurableParser
from tokentape.listen import parse_address
from tokentape.option_types import count, positive_count, positive_seconds
from tokentape_executor.cli.help_text import DESCRIPTION, EPILOG, USAGE
from tokentape_executor.oracle_report import DEFAULT_TOLERANCE
from tokentape_executor.settings import OnFailure

GYM = "math"
"""What `--agent` calls NeMo Gym's agent."""

ON_FAILURE = {"record": OnFailure.RAISE, "placeholder": OnFailure.PLACEHOLDER}
"""What `--on-failure` calls what becomes of a failed rollout."""


def make_parser() -> ConfigurableParser:
    """Return the parser of all three modes' options."""
    parser = ConfigurableParser(
        passes_on=True,
        prog="tokentape-rollout",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="?", type=Path, metavar="PROMPTS", help="JSON lines, a task each")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where results go; with --script, where the script goes (default: standard output)",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="the checkpoint that a sidecar is started for; with --verify: for transformers"
    )
    for add in (
        _add_policy,
        add_access_options,
        _add_agent,
        _add_rollouts,
        _add_sampling,
        _add_failures,
        _add_verify,
        _add_script,
    ):
        add(parser)
    return parser


def _add_policy(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the policy (or --model DIR -- VLLM OPTIONS)")
    group.add_argument(
        "--sidecar",
        action="append",
        default=[],
        type=parse_address,
        metavar="ADDRESS",
        help="a running sidecar, HOST:PORT or unix:/PATH; repeatable: each rollout goes to the one that has the fewest",
    )
    group.add_argument(
        "--bridge",
        type=_base_url,
        metavar="URL",
        help="a running bridge to these sidecars, as in http://127.0.0.1:8000/v1 (default: one is started)",
    )
    _add(group, "--bridge-key-file", Path, "FILE", "a file whose first line is a key that this bridge asks for")


def _add_agent(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the agent")
    group.add_argument(
        "--agent",
        default=GYM,
        metavar="AGENT",
        help=f"{GYM}: an agent of NeMo Gym; else FILE.py:CLASS or MODULE:CLASS, a TapeExecutor (default: %(default)s)",
    )
    group.add_argument(
        "--gym-agent", metavar="NAME", help="the agent of rows without an agent_ref (TOKENTAPE_GYM_AGENT)"
    )


def _add_rollouts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rollouts")
    _add(group, "--samples", positive_count, "N", "rollouts of each prompt (default: 1)", default=1)
    _add(group, "--concurrency", positive_count, "N", "how many run at once (default: 32)", default=32)
    _add(group, "--limit", positive_count, "N", "only the first N prompts")
    _add(group, "--max-turns", positive_count, "N", "most calls of a rollout (TOKENTAPE_MAX_TURNS)")
    _add(
        group,
        "--max-weight-changes",
        count,
        "N",
        "most changes of the weights that a call may live through after its first token (TOKENTAPE_MAX_WEIGHT_CHANGES)",
    )
    _add(
        group, "--rollout-timeout", positive_seconds, "S", "seconds that a rollout may take (TOKENTAPE_ROLLOUT_TIMEOUT)"
    )
    _add(group, "--turn-timeout", positive_seconds, "S", "seconds that a turn of it may take (TOKENTAPE_TURN_TIMEOUT)")
    _add(
        group,
        "--reader-tokens",
        Path,
        "FILE",
        "begin FILE anew with a line per tape, for tokentape-watch: who reads it can read and seal these tapes",
    )
    _add(group, "--tapes", Path, "FILE", "also append the tape of each rollout that gave samples (docs/tape-file.md)")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling: pinned for every call, whatever the agent asks for")
    _add(group, "--temperature", _number(0), "T", "softmax temperature; 0 is greedy")
    _add(group, "--top-p", _number(0, 1), "P", "nucleus")
    _add(group, "--max-tokens", positive_count, "N", "most tokens sampled in a call")
    _add(group, "--max-context-tokens", positive_count, "N", "most tokens of prompt and completion together")


def _add_failures(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("failures")
    _add(group, "--retries", count, "N", "how often a failed rollout is run again (TOKENTAPE_RETRIES; default: 2)")
    group.add_argument(
        "--on-failure",
        choices=sorted(ON_FAILURE),
        help="then: record a row of status failed (default), or a placeholder of one sampled token "
        "(TOKENTAPE_ON_FAILURE)",
    )
    group.add_argument(
        "--retry-failed", action="store_true", help="run the failed rows of an earlier run again, and replace them"
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tapes: --verify TAPES --model DIR")
    _add(group, "--verify", Path, "TAPES", "re-score every sample of these tapes with --model")
    _add(
        group,
        "--tolerance",
        float,
        "NATS",
        "the largest difference that passes at any token (default: %(default)s, for bfloat16 at temperature 1)",
        default=DEFAULT_TOLERANCE.largest,
    )
    _add(
        group,
        "--mean-tolerance",
        float,
        "NATS",
        "the largest mean difference of any sample that passes (default: %(default)s)",
        default=DEFAULT_TOLERANCE.mean,
    )
    _add(
        group,
        "--dtype",
        str,
        "TYPE",
        "the model's precision, as in float32 (default: the checkpoint's)",
        default="auto",
    )
    group.add_argument(
        "--weight-version",
        action="append",
        metavar="V",
        help="a recorded version that is the model's weights; repeatable (default: the tapes' only one)",
    )
    group.add_argument(
        "--skip-refused",
        action="store_true",
        help="pass although tokens cannot be compared: of other versions, of a stale cache, of penalties",
    )


def _add_script(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tapes: --script TAPES")
    _add(group, "--script", Path, "TAPES", "write one of these tapes as a script of the scripted engine")
    _add(group, "--tape", int, "N", "which tape, from 0 (default: 0)", default=0)


def _add(
    group: argparse._ArgumentGroup,  # pyright: ignore[reportPrivateUsage] - argparse has no public name for it
    option: str,
    kind: Callable[[str], object],
    metavar: str,
    text: str,
    *,
    default: object = None,
) -> None:
    group.add_argument(option, type=kind, metavar=metavar, help=text, default=default)


def _number(least: float, most: float = float("inf")) -> Callable[[str], float]:
    """Return a type of finite numbers from `least` to `most`."""
    bounds = f"{least:g} or more" if most == float("inf") else f"from {least:g} to {most:g}"

    def parse_number(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not least <= number <= most or number == float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number, {bounds}")
        return number

    return parse_number


def _base_url(text: str) -> str:
    """Return an OpenAI base URL, with its `/v1` where it was left out."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL, as in http://127.0.0.1:8000/v1")
    return f"{text.rstrip('/').removesuffix('/v1')}/v1"
