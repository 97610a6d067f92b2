"""What tokentape's server processes have in common: the `--listen` and `--ready-file` options, and logging."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path

from tokentape.listen import ListenAddress, UnixAddress, parse_address


def add_server_options(parser: argparse.ArgumentParser, *, default_listen: str, unix: bool = False) -> None:
    """Add `--listen`, `--ready-file` and `--log-level` to a server's options; `unix`: it can serve on a Unix socket."""
    parser.add_argument(
        "--listen",
        type=parse_address if unix else ListenAddress.parse,
        default=ListenAddress.parse(default_listen),
        metavar="ADDRESS" if unix else "HOST:PORT",
        help=f"where to serve{': HOST:PORT or unix:/PATH' if unix else ''}; port 0 picks a free one "
        f"(default: {default_listen})",
    )
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help='written when, and only when, this process serves: {"address": "HOST:PORT", "pid": N}',
    )
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="least severe messages to log, on standard error (default: info)",
    )
    parser.add_argument(
        "--log-format",
        choices=["text", "json"],
        default="text",
        help="a line of text or a JSON object per message (default: text)",
    )


def configure_logging(level: str) -> None:
    """Log to standard error, one line a message, from `level` up."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True
    )


def write_ready_file(path: Path, address: ListenAddress | UnixAddress) -> None:
    """Publish that this process serves at `address`; readers see the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({"address": str(address), "pid": os.getpid()}) + "\n")
    draft.replace(path)
