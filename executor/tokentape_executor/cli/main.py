"""The command `tokentape-rollout`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from tokentape_executor.cli.arguments import Options, RunOptions, ScriptOptions, VerifyOptions, parse
from tokentape_executor.errors import ExecutorError

_PLAIN_WIDTH = 120
_SIGNALLED = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tokentape-rollout` and return its exit status.

    0: all is well; 1: rollouts failed (their rows say why), or tapes do not verify; 2: it cannot use what it was given,
    or what it needs did not start; 128 + n: ended by signal n.
    """
    options = parse(sys.argv[1:] if arguments is None else arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    try:
        return _run(options, console)
    except (ExecutorError, OSError) as error:
        print(f"tokentape-rollout: {error}", file=sys.stderr)  # noqa: T201 - a command's own output
        return 2
    except KeyboardInterrupt:
        return _SIGNALLED + signal.SIGINT


def _run(options: Options, console: Console) -> int:
    """Run the mode that `options` are of. Only that one is imported: each needs much that the others do not."""
    match options:
        case VerifyOptions():
            from tokentape_executor.cli.verify import verify  # noqa: PLC0415

            return verify(options, console)
        case ScriptOptions():
            from tokentape_executor.cli.script import write_script  # noqa: PLC0415

            return write_script(options)
        case RunOptions():
            from tokentape_executor.cli.run import run  # noqa: PLC0415

            return run(options, console)
