"""Where a tape's entries come from: a sidecar, or a file. Text is on them where it can be had."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import grpc.aio

from tokentape.access import Access, UnusableAccess
from tokentape.channel import dial
from tokentape.text_pieces import TextPieces
from tokentape.v1 import tape_pb2, tape_pb2_grpc
from tokentape_executor.errors import ExecutorError
from tokentape_executor.reader_tokens import ReadableTape
from tokentape_executor.tape_client import follow
from tokentape_executor.tape_file import StoredTape, read_tapes
from tokentape_executor.watch.arguments import FollowOptions, ReplayOptions

_SHORTEST_PAUSE_SECONDS = 0.01
_TOKENIZER = "tokenizer.json"


async def followed(
    readable: ReadableTape, address: str, options: FollowOptions, *, text: bool, on_lost: Callable[[], object]
) -> AsyncGenerator[tape_pb2.TapeEntry]:
    """Yield a tape's entries as its sidecar records them. Raises as `tape_client.follow` does."""
    request = tape_pb2.WatchTapeRequest(
        tape_id=readable.tape.tape_id,
        reader_token=readable.tape.reader_token,
        from_sequence=options.from_sequence,
        include_text=text,
    )
    async with _dial(address, options.access) as channel:
        stub = tape_pb2_grpc.TapeServiceStub(channel)
        entries = follow(stub, request, patience_seconds=options.patience_seconds, on_lost=on_lost)
        async with contextlib.aclosing(entries):
            async for entry in entries:
                yield entry


def stored(options: ReplayOptions) -> StoredTape:
    """Return the tape of a file that is wanted. Raises `ExecutorError`."""
    tapes = list(read_tapes(options.tapes))
    if options.tape >= len(tapes):
        raise ExecutorError(f"--tape {options.tape}: {options.tapes} has {len(tapes)} tapes, counted from 0")
    return tapes[options.tape]


def pieces_for(tape: StoredTape, options: ReplayOptions) -> TextPieces | None:
    """Return the text of the tape's tokens; `None` where no tokenizer is at hand. Raises `ExecutorError`."""
    if options.tokenizer is None:
        file = Path(tape.model.name) / _TOKENIZER
        if not file.is_file():
            return None
    else:
        file = options.tokenizer / _TOKENIZER
    try:
        return TextPieces.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExecutorError(f"--tokenizer: cannot use {file}: {error}") from None


async def replayed(
    tape: StoredTape, pieces: TextPieces | None, tokens_per_second: float
) -> AsyncGenerator[tape_pb2.TapeEntry]:
    """Yield a tape's entries at this speed, token by token; at once, and as they were stored, if it is infinite."""
    pace = _Pace(tokens_per_second)
    for entry in tape.entries:
        for part in [entry] if math.isinf(tokens_per_second) else _token_by_token(entry):
            await pace.take(len(part.tokens_sampled.token_ids))
            yield part if pieces is None else _with_text(part, pieces)


class _Pace:
    def __init__(self, tokens_per_second: float) -> None:
        self._seconds = 1 / tokens_per_second
        self._due = time.monotonic()

    async def take(self, tokens: int) -> None:
        """Return when these tokens are due."""
        self._due += tokens * self._seconds
        pause = self._due - time.monotonic()
        if pause > _SHORTEST_PAUSE_SECONDS:
            await asyncio.sleep(pause)


def _token_by_token(entry: tape_pb2.TapeEntry) -> Iterator[tape_pb2.TapeEntry]:
    if not entry.HasField("tokens_sampled"):
        yield entry
        return
    run = entry.tokens_sampled
    for index in range(len(run.token_ids)):
        part = tape_pb2.TapeEntry(sequence=entry.sequence + index, tokens_sampled=run)
        for name in ("token_ids", "logprobs", "top_logprobs"):
            part.tokens_sampled.ClearField(name)
        part.tokens_sampled.token_ids.append(run.token_ids[index])
        part.tokens_sampled.logprobs.append(run.logprobs[index])
        yield part


def _with_text(entry: tape_pb2.TapeEntry, pieces: TextPieces) -> tape_pb2.TapeEntry:
    copy = tape_pb2.TapeEntry()
    copy.CopyFrom(entry)
    if entry.HasField("call_started"):
        copy.call_started.text_pieces.extend(pieces[i] for i in entry.call_started.prompt_token_ids)
    elif entry.HasField("tokens_sampled"):
        copy.tokens_sampled.text_pieces.extend(pieces[i] for i in entry.tokens_sampled.token_ids)
    return copy


def _dial(address: str, access: Access) -> grpc.aio.Channel:
    try:
        return dial(address, access)
    except UnusableAccess as error:
        raise ExecutorError(str(error)) from None
