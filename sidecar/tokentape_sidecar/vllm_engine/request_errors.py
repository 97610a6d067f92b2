"""What it means for a call that vLLM ends its request by an error."""

from __future__ import annotations

import logging

from vllm.v1.engine.exceptions import EngineDeadError

from tokentape_sidecar.engine import Sink
from tokentape_sidecar.errors import EngineBusy, EngineDead, InvalidArgument
from tokentape_sidecar.vllm_engine import versions

logger = logging.getLogger(__name__)


def fail_call(sink: Sink, call_id: str, error: Exception) -> None:
    """Fail a call whose request vLLM has ended by `error`; an unexpected one is logged."""
    if isinstance(error, EngineDeadError):
        sink.fail(EngineDead("the engine died while it sampled this call"))
    elif isinstance(error, versions.BUSY):
        sink.fail(EngineBusy(str(error)))
    elif isinstance(error, versions.INVALID):
        # Only what says so by its class: a bare `ValueError` is as likely a fault of vLLM's own output handler.
        sink.fail(InvalidArgument("sampling", str(error)))
    else:
        logger.error("vLLM failed the call %s", call_id, exc_info=error)
        sink.fail(error)
