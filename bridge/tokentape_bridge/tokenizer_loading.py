"""A sidecar's tokenizer: received as an archive, verified, and loaded once for all sidecars that have the same."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from weakref import WeakValueDictionary

from tokentape.v1 import generation_pb2_grpc
from tokentape.v1.generation_pb2 import GetTokenizerRequest, GetTokenizerResponse
from tokentape_bridge.archive import MAX_ARCHIVE_BYTES, ArchiveError, unpack, verify
from tokentape_bridge.tokenizer import Tokenizer

_TIMEOUT_SECONDS = 60

_loaded: WeakValueDictionary[str, Tokenizer] = WeakValueDictionary()
"""By their archive's SHA-256."""

_load_lock = threading.Lock()
"""transformers cannot be imported by two threads at once."""


async def load_tokenizer(sidecar: generation_pb2_grpc.GenerationServiceAsyncStub, held: Tokenizer | None) -> Tokenizer:
    """Return the sidecar's tokenizer: `held`, where that is the one that it has.

    Raises `ArchiveError` or `TokenizerError` where it cannot be used, `AioRpcError` where the sidecar does not give it.
    """
    call = sidecar.GetTokenizer(GetTokenizerRequest(), timeout=_TIMEOUT_SECONDS)
    try:
        pieces = aiter(call)
        first = await anext(pieces, GetTokenizerResponse())
        if held is not None and held.sha256 == first.sha256:
            return held
        archive = await _receive(first, pieces)
        return await asyncio.to_thread(_unpack_and_load, archive, first.sha256)
    finally:
        call.cancel()


async def _receive(first: GetTokenizerResponse, rest: AsyncIterator[GetTokenizerResponse]) -> bytes:
    """Return the verified archive of which `first` is the first piece. Raises `ArchiveError`."""
    if first.size_bytes > MAX_ARCHIVE_BYTES:
        raise ArchiveError(f"the tokenizer's archive has {first.size_bytes} bytes, more than {MAX_ARCHIVE_BYTES}")
    archive = bytearray(first.data)
    async for piece in rest:
        archive += piece.data
        if len(archive) > first.size_bytes:
            break
    whole = bytes(archive)
    verify(whole, sha256=first.sha256, size_bytes=first.size_bytes)
    return whole


def _unpack_and_load(archive: bytes, sha256: str) -> Tokenizer:
    with _load_lock:
        tokenizer = _loaded.get(sha256)
        if tokenizer is None:
            with tempfile.TemporaryDirectory(prefix="tokentape-tokenizer-") as directory:
                unpack(archive, Path(directory))
                tokenizer = _loaded[sha256] = Tokenizer.load(Path(directory), sha256)
            _spare_the_collector()
        return tokenizer


def _spare_the_collector() -> None:
    """Take what is loaded now out of the garbage collector's sight.

    Each full collection would otherwise go through it, and stop every stream for more than 100 ms.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
