"""The trainer's end of `TapeService`: open a tape, follow it to its end, seal it.

`watch` yields every entry of a tape once and in order, whatever happens to the connection: after UNAVAILABLE it asks
again from the first position that it has not yielded. It gives up when no entry has come for `PATIENCE_SECONDS` since
the connection was lost. `seal`, which may be repeated, is as patient.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from tokentape.v1 import generation_pb2, generation_pb2_grpc, tape_pb2, tape_pb2_grpc, types_pb2
from tokentape_executor.assembler import positions
from tokentape_executor.errors import from_rpc_error

PATIENCE_SECONDS = 10.0
"""How long `watch` and `seal` try to get back to a sidecar that they have lost."""

_RETRY_SECONDS = 0.2
_UNARY_TIMEOUT_SECONDS = 10.0
_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class OpenedTape:
    """A tape and the secret that reading it takes."""

    tape_id: str = field(repr=False)
    """Lets its holder append: it travels with the agent's requests."""
    reader_token: str = field(repr=False)
    """Lets its holder read, seal and delete: it stays here."""


@dataclass(frozen=True, slots=True)
class TapeOptions:
    """What else may hold for a tape; `tape.proto` has the words of the contract."""

    max_sampled_tokens: int | None = None
    """Most tokens sampled on the whole tape: calls are clamped to what is left, and then refused."""
    max_calls: int | None = None
    """Most calls on the tape."""
    max_weight_changes: int | None = None
    """Most changes of the weights that a call may live through after its first token; 0: none."""
    policy_seed: int | None = None
    """Makes each call's seed, together with the tape's id and the call's index; `None`: calls keep their own."""
    keep_reasoning: bool = False
    """Whether reasoning stays in later prompts where the chat template would leave it out."""


NO_OPTIONS = TapeOptions()
"""No further limits, and every call's own seed."""


class TapeClient:
    """Tapes of one sidecar. Belongs to the event loop of its channel, and does not close it."""

    def __init__(
        self, channel: grpc.aio.Channel, sidecar_name: str, *, time_to_live_seconds: float | None = None
    ) -> None:
        """`channel` comes from `tokentape.channel.dial`; `sidecar_name` is the sidecar's own, as in GetModel.

        The sidecar keeps each tape for `time_to_live_seconds` after its last call and its last reader; `None`: for as
        long as it does by itself.
        """
        self._stub = tape_pb2_grpc.TapeServiceStub(channel)
        self._generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.sidecar_name = sidecar_name
        """The part of its tapes' ids before the dot."""
        self._time_to_live = None if time_to_live_seconds is None else _duration(time_to_live_seconds)

    async def open(
        self,
        *,
        max_context_tokens: int | None = None,
        sampling_policy: types_pb2.SamplingParameters | None = None,
        options: TapeOptions = NO_OPTIONS,
    ) -> OpenedTape:
        """Open a tape under a new id.

        `max_context_tokens` bounds prompt and completion together in each call, in tokens; the fields that
        `sampling_policy` has hold for every call. Raises `RolloutError` by the table in `errors.py`.
        """
        tape_id = f"{self.sidecar_name}.{secrets.token_hex(_ID_BYTES)}"
        request = tape_pb2.OpenTapeRequest(
            tape_id=tape_id,
            limits=tape_pb2.TapeLimits(
                max_context_tokens=max_context_tokens,
                max_sampled_tokens=options.max_sampled_tokens,
                max_calls=options.max_calls,
                max_weight_changes=options.max_weight_changes,
                time_to_live=self._time_to_live,
            ),
            sampling_policy=sampling_policy,
            policy_seed=options.policy_seed,
            keep_reasoning=options.keep_reasoning,
        )
        try:
            response = await self._stub.OpenTape(request, timeout=_UNARY_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error("opening a tape", error) from error
        return OpenedTape(tape_id, response.reader_token)

    async def watch(self, tape: OpenedTape, *, from_sequence: int = 0) -> AsyncGenerator[tape_pb2.TapeEntry]:
        """Yield the tape's entries from `from_sequence` on, until it is sealed. Close the generator when leaving early.

        Raises `RolloutError` by the table in `errors.py`; `TapeLost` also where the sidecar came back without the tape.
        """
        request = tape_pb2.WatchTapeRequest(
            tape_id=tape.tape_id, reader_token=tape.reader_token, from_sequence=from_sequence
        )
        async with contextlib.aclosing(follow(self._stub, request)) as entries:
            async for entry in entries:
                yield entry

    async def seal(self, tape: OpenedTape, *, patience_seconds: float | None = None) -> None:
        """End the tape: its running calls are aborted, later ones refused.

        Waits `patience_seconds` for the sidecar; `None`: as long as `watch` does. Raises as `open` does.
        """
        patience = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        request = tape_pb2.SealTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token)
        started = time.monotonic()
        while True:
            try:
                await self._stub.SealTape(request, timeout=min(patience, _UNARY_TIMEOUT_SECONDS))
            except grpc.aio.AioRpcError as error:
                if not _may_come_back(error, started, patience):
                    raise from_rpc_error("sealing a tape", error) from error
            else:
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def sample(
        self, tape_id: str, prompt_token_ids: Sequence[int], sampling: types_pb2.SamplingParameters
    ) -> None:
        """Make one call on the tape, which has what came of it. Raises as `open` does."""
        request = generation_pb2.GenerateRequest(tape_id=tape_id, prompt_token_ids=prompt_token_ids, sampling=sampling)
        call = self._generation.Generate(request)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error("sampling", error) from error
        finally:
            call.cancel()


async def follow(
    stub: tape_pb2_grpc.TapeServiceAsyncStub,
    request: tape_pb2.WatchTapeRequest,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    on_lost: Callable[[], object] = lambda: None,
) -> AsyncGenerator[tape_pb2.TapeEntry]:
    """Yield the entries that `request` asks for until the tape is sealed, over as many connections as it takes.

    `on_lost` is called whenever there is no connection, before the next try. Close the generator when leaving early.
    Raises as `TapeClient.watch` does.
    """
    wanted = tape_pb2.WatchTapeRequest()
    wanted.CopyFrom(request)
    lost_since: float | None = None
    while True:
        call = stub.WatchTape(wanted)
        try:
            async for response in call:
                lost_since = None
                for entry in response.entries:
                    yield entry
                    wanted.from_sequence = entry.sequence + positions(entry)
        except grpc.aio.AioRpcError as error:
            lost_since = lost_since or time.monotonic()
            if not _may_come_back(error, lost_since, patience_seconds):
                raise from_rpc_error("watching a tape", error) from error
        else:
            return
        finally:
            # Otherwise the sidecar's side of the stream would live on.
            call.cancel()
        on_lost()
        await asyncio.sleep(_RETRY_SECONDS)


def _may_come_back(error: grpc.aio.AioRpcError, lost_since: float, patience_seconds: float) -> bool:
    """Whether to try again after `error`, with the sidecar away since `lost_since` (monotonic)."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() - lost_since <= patience_seconds


def _duration(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
