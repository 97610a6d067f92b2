"""Where vLLM's releases differ in what this adapter uses; all else here is the same in each of them.

| since | what changed |
|---|---|
| 0.27 | `VLLMClientError` for a wrong request |
| 0.29 | `check_admission` and `GracefulHTTPError`: a full queue refuses a request |
| 0.32 | outputs are stamped with the version of the weights; before that `WeightObserver` numbers the updates it sees |
| 0.32 | `RetryableRequestError` for a request that may be made again |
| 0.33 | a request that was taken may end by one of `INVALID` (a wrong grammar) or `BUSY` |
| 0.33 | `AsyncLLM.pause_generation`, but for its mode `keep`, has new requests end by one of `BUSY` |

The core's `pause_scheduler`, which does the pausing in all of them, holds new requests whatever its mode.
"""

from __future__ import annotations

import vllm
from packaging.version import Version
from vllm import exceptions as vllm_exceptions
from vllm.v1.engine.async_llm import AsyncLLM

_release = Version(Version(vllm.__version__).base_version)


def _since(release: str) -> bool:
    return _release >= Version(release)


INVALID: tuple[type[Exception], ...] = (vllm_exceptions.VLLMClientError,) if _since("0.27") else ()
"""What vLLM ends a request by that is wrong."""

REFUSED: tuple[type[Exception], ...] = (ValueError, *INVALID)
"""What vLLM raises for a request that is wrong."""

BUSY: tuple[type[Exception], ...] = (
    *((vllm_exceptions.GracefulHTTPError,) if _since("0.29") else ()),
    *((vllm_exceptions.RetryableRequestError,) if _since("0.32") else ()),
)
"""What vLLM raises for a request, or ends it by, that it does not take now and may take later."""

NAMES_WEIGHTS = _since("0.32")
"""Whether vLLM takes a name for its weights, and stamps its outputs with it."""


def direct_path_supported() -> bool:
    """Whether the installed vLLM is one whose internals the direct path was verified with."""
    return _since("0.24") and not _since("0.34")


def check_admission(engine: AsyncLLM, n: int, request_id: str) -> None:
    """Raise one of `BUSY` where `n` more requests are more than the engine takes."""
    if _since("0.29"):
        engine.check_admission(n, request_id)
