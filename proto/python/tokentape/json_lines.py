"""The log's JSON lines: `{"time", "level", "logger", "message", …}`.

Besides, as far as they are known: `request_id`, `call_id`, `trace_id`; `exception`, a traceback; and what the message's
writer gave as `extra`.
"""

from __future__ import annotations

import logging

from pythonjsonlogger.core import RESERVED_ATTRS, LogData
from pythonjsonlogger.json import JsonFormatter
from typing_extensions import override

from tokentape.logs import bound

# What vLLM and uvicorn put on records for formatters of their own.
_OTHERS = ("vllm_process_name", "fileinfo", "color_message")


class JsonLines(JsonFormatter):
    """Formats a message as one JSON object. vLLM's configuration file names this class."""

    def __init__(self) -> None:
        """Take no options: all processes log alike."""
        super().__init__(
            "%(levelname)s %(name)s %(message)s",
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
            reserved_attrs=[*RESERVED_ATTRS, *_OTHERS],
            timestamp="time",
        )

    @override
    def add_fields(self, log_data: LogData, record: logging.LogRecord, message_dict: LogData) -> None:
        super().add_fields(log_data, record, message_dict)
        log_data.update(bound())
