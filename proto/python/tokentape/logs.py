"""The log of tokentape's processes: standard error, a line of text or a JSON object per message.

A line says which request, call and trace it is about, as far as the task that writes it has told by `bind`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Literal

from typing_extensions import override

LogFormat = Literal["text", "json"]
"""What a line of the log is."""

REQUEST_ID_HEADER = "x-request-id"
"""The HTTP header, and the metadata of calls, that names a request: it is `request_id` in the log."""

_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_ids: ContextVar[Mapping[str, str]] = ContextVar("ids", default=MappingProxyType({}))


def bind(**ids: str) -> None:
    """Say what this task works for, as in `bind(call_id=…)`; it is on all lines of the task and of those it starts."""
    _ids.set({**_ids.get(), **ids})


def bound() -> Mapping[str, str]:
    """Return what this task works for, by name."""
    return _ids.get()


def configure_logging(level: str, log_format: LogFormat = "text") -> None:
    """Log to standard error from `level` (a name of `logging`, in any case) up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_json_lines() if log_format == "json" else _TextLines(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # What it has to say at the level of debug is about itself, for every call.
    logging.getLogger("grpc").setLevel(logging.INFO)
    # They would be plain text between the objects.
    logging.captureWarnings(log_format == "json")


class _TextLines(logging.Formatter):
    """A line of text per message, with the ids that the message does not say itself."""

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        unsaid = [f"{name}={value}" for name, value in _ids.get().items() if value not in record.message]
        return f"{line} [{' '.join(unsaid)}]" if unsaid else line


def _json_lines() -> logging.Formatter:
    # Its package comes with the extras of servers; others log text.
    from tokentape.json_lines import JsonLines  # noqa: PLC0415

    return JsonLines()
