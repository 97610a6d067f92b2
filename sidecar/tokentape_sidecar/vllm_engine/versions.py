"""Where vLLM's releases differ in what this adapter uses; all else here is the same in each of them.

| since | what changed |
|---|---|
| 0.27 | `VLLMClientError` for a wrong request |
| 0.29 | `check_admission` and `GracefulHTTPError`: a full queue refuses a request |
| 0.32 | outputs are stamped with the version of the weights; before that `WeightObserver` numbers the updates it sees |
"""

from __future__ import annotations

import vllm
from packaging.version import Version
from vllm import exceptions as vllm_exceptions
from vllm.v1.engine.async_llm import AsyncLLM

_release = Version(Version(vllm.__version__).base_version)


def _since(release: str) -> bool:
    return _release >= Version(release)


REFUSED: tuple[type[Exception], ...] = (
    (ValueError, vllm_exceptions.VLLMClientError) if _since("0.27") else (ValueError,)
)
"""What vLLM raises for a request that is wrong."""

BUSY: tuple[type[Exception], ...] = (vllm_exceptions.GracefulHTTPError,) if _since("0.29") else ()
"""What vLLM raises for a request that it has no room for now."""


NAMES_WEIGHTS = _since("0.32")
"""Whether vLLM takes a name for its weights, and stamps its outputs with it."""


def direct_path_supported() -> bool:
    """Whether the installed vLLM is one whose internals the direct path was verified with."""
    return _since("0.24") and not _since("0.34")


def check_admission(engine: AsyncLLM, n: int, request_id: str) -> None:
    """Raise one of `BUSY` where `n` more requests are more than the engine takes."""
    if _since("0.29"):
        engine.check_admission(n, request_id)
