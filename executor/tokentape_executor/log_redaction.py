"""Keeping tape ids out of the logs of other libraries: whoever reads one could append to a tape that still runs.

OpenAI's client, httpx and what is below them log the URL and the headers of each call, and a rollout's tape is there.
"""

from __future__ import annotations

import logging
import re

_TAPE_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,63})\.[0-9a-f]{32}\b")
_CLIENTS = ("httpx", "httpx2", "openai._base_client", "anthropic._base_client")
# A filter of a logger sees nothing of what its children log.
_CONNECTIONS = [
    f"{library}.{part}" for library in ("httpcore", "httpcore2") for part in ("connection", "http11", "http2", "proxy")
]


def hide_tapes() -> None:
    """Have these libraries log of a tape id no more than its sidecar's name. Again does nothing."""
    for name in (*_CLIENTS, *_CONNECTIONS):
        logging.getLogger(name).addFilter(_HIDE_TAPES)


class _HideTapes(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        hidden = _TAPE_ID.sub(r"\1.…", message)
        if hidden != message:
            record.msg, record.args = hidden, None
        return True


_HIDE_TAPES = _HideTapes()
