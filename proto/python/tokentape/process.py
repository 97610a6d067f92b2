"""What tokentape's server processes have in common: options of serving and of telemetry, and the ready file."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from tokentape.listen import ListenAddress, UnixAddress, parse_address

TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""The standard environment variable that `--otlp-traces-endpoint` stands for."""


def add_serving_options(parser: argparse.ArgumentParser, *, default_listen: str, unix: bool = False) -> None:
    """Add `--listen` and `--ready-file`; `unix`: it can serve on a Unix socket."""
    group = parser.add_argument_group("serving")
    group.add_argument(
        "--listen",
        type=parse_address if unix else ListenAddress.parse,
        default=ListenAddress.parse(default_listen),
        metavar="ADDRESS" if unix else "HOST:PORT",
        help=f"where to serve{': HOST:PORT or unix:/PATH' if unix else ''}; port 0 picks a free one "
        f"(default: {default_listen})",
    )
    group.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="written when, and only when, this process serves: a JSON object with its address, its pid, and the "
        "addresses of what else it serves",
    )


def add_telemetry_options(parser: argparse.ArgumentParser, *, metrics: str = "") -> None:
    """Add the options of logs and traces, and `--metrics-listen` if `metrics` says what is served there."""
    group = parser.add_argument_group("telemetry")
    group.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="least severe messages to log, on standard error (default: info)",
    )
    group.add_argument(
        "--log-format",
        choices=["text", "json"],
        default="text",
        help="a line of text or a JSON object per message (default: text)",
    )
    if metrics:
        group.add_argument(
            "--metrics-listen",
            type=ListenAddress.parse,
            metavar="HOST:PORT",
            help=f"serve {metrics} for Prometheus at http://HOST:PORT/metrics (default: nowhere)",
        )
    group.add_argument(
        "--otlp-traces-endpoint",
        type=_http_url,
        default=os.environ.get(TRACES_VARIABLE) or None,
        metavar="URL",
        help=f"send OpenTelemetry traces there, as in http://127.0.0.1:4317 (default: ${TRACES_VARIABLE}; without "
        "either none are made); OpenTelemetry's other variables say how",
    )


def _http_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL, as in http://127.0.0.1:4317 ({TRACES_VARIABLE})")
    return text


class UnusableReadyFile(ValueError):
    """The ready file cannot be written; the message names its option."""


def clear_ready_file(path: Path) -> None:
    """Remove what a process that was killed has left there: it serves no more. Raises `UnusableReadyFile`.

    For who has seen that nobody else serves at its address, and does not serve yet.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error


def write_ready_file(
    path: Path, address: ListenAddress | UnixAddress, **others: ListenAddress | UnixAddress | str | None
) -> None:
    """Publish that this process serves at `address`, and at `others` by what is served there (`None`: it is not).

    Readers see the whole file or none. Raises `UnusableReadyFile`.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    told = {name: str(other) for name, other in others.items() if other is not None}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"address": str(address), "pid": os.getpid(), **told}) + "\n")
        draft.replace(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> UnusableReadyFile:
    return UnusableReadyFile(f"--ready-file {path} cannot be written: {error.strerror}")
