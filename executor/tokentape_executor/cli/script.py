"""`tokentape-rollout --script`: a tape as a script of the scripted engine."""

from __future__ import annotations

import json
import sys

from tokentape_executor.cli.arguments import ScriptOptions
from tokentape_executor.errors import ExecutorError
from tokentape_executor.tape_file import read_tapes
from tokentape_executor.tape_script import to_script


def write_script(options: ScriptOptions) -> int:
    """Write the script and return the exit status. Raises `ExecutorError`, or `OSError` where it cannot be written."""
    tapes = list(read_tapes(options.tapes))
    if not 0 <= options.tape < len(tapes):
        raise ExecutorError(f"--tape {options.tape}: {options.tapes} has {len(tapes)} tapes, counted from 0")
    tape = tapes[options.tape]
    text = json.dumps(to_script(tape.entries, tape.model)) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text)
    return 0
