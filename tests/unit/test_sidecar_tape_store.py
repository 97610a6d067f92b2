"""The store of tapes: who may open and read one, and when one is forgotten."""

from __future__ import annotations

import asyncio

import pytest

from support.engines import ManualEngine
from support.sidecar_client import new_tape_id
from tokentape_sidecar import tape_store
from tokentape_sidecar.call_request import CallRequest
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import Sampling
from tokentape_sidecar.errors import AlreadyExists, InvalidArgument, LimitReached, NotFound, PermissionDenied
from tokentape_sidecar.limits import DEFAULT_LIMITS, Limits
from tokentape_sidecar.tape import Tape, TapeLimits, TapePolicy
from tokentape_sidecar.tape_store import TapeStore


def new_store(limits: Limits = DEFAULT_LIMITS) -> tuple[TapeStore, Calls, ManualEngine]:
    engine = ManualEngine()
    calls = Calls(engine)
    return TapeStore("main", engine.model, calls, limits), calls, engine


def open_tape(store: TapeStore, *, time_to_live_seconds: float | None = None) -> Tape:
    return store.open(new_tape_id(), TapeLimits(time_to_live_seconds=time_to_live_seconds), TapePolicy())


def test_a_tape_is_found_by_its_id_and_read_by_its_token() -> None:
    store, _, _ = new_store()
    tape, other = open_tape(store), open_tape(store)
    assert store.writable(tape.tape_id) is tape
    assert store.readable(tape.tape_id, tape.reader_token) is tape
    with pytest.raises(PermissionDenied):
        store.readable(tape.tape_id, other.reader_token)


def test_an_id_is_taken_once() -> None:
    store, _, _ = new_store()
    tape = open_tape(store)
    with pytest.raises(AlreadyExists, match="there is a tape of this id already"):
        store.open(tape.tape_id, TapeLimits(), TapePolicy())


def test_an_id_that_is_not_a_tape_or_another_sidecars_is_refused() -> None:
    store, _, _ = new_store()
    with pytest.raises(NotFound):
        store.writable(new_tape_id())
    for tape_id in (new_tape_id("other"), "main", "../etc/passwd"):
        with pytest.raises(InvalidArgument, match="tape_id"):
            store.writable(tape_id)
        with pytest.raises(InvalidArgument, match="tape_id"):
            store.open(tape_id, TapeLimits(), TapePolicy())


@pytest.mark.parametrize(
    ("limits", "policy", "field"),
    [
        (TapeLimits(max_context_tokens=0), TapePolicy(), "limits.max_context_tokens"),
        (TapeLimits(max_sampled_tokens=0), TapePolicy(), "limits.max_sampled_tokens"),
        (TapeLimits(max_calls=0), TapePolicy(), "limits.max_calls"),
        (TapeLimits(time_to_live_seconds=0), TapePolicy(), "limits.time_to_live"),
        (TapeLimits(time_to_live_seconds=-1), TapePolicy(), "limits.time_to_live"),
        (TapeLimits(), TapePolicy(Sampling(temperature=-1)), "sampling_policy.temperature"),
    ],
)
def test_a_bad_field_is_named_and_opens_nothing(limits: TapeLimits, policy: TapePolicy, field: str) -> None:
    store, _, _ = new_store()
    tape_id = new_tape_id()
    with pytest.raises(InvalidArgument) as caught:
        store.open(tape_id, limits, policy)
    assert caught.value.field == field
    with pytest.raises(NotFound):
        store.writable(tape_id)


def test_the_store_has_a_limit() -> None:
    store, _, _ = new_store(Limits(max_tapes=2))
    open_tape(store)
    open_tape(store)
    with pytest.raises(LimitReached, match="holds 2 tapes"):
        open_tape(store)


async def test_deleting_seals_and_forgets() -> None:
    store, calls, _ = new_store()
    tape = open_tape(store)
    record = await calls.start(CallRequest([1]), tape)
    await store.delete(tape)
    assert tape.sealed
    assert record.ended
    with pytest.raises(NotFound):
        store.readable(tape.tape_id, tape.reader_token)


async def test_only_idle_tapes_past_their_time_to_live_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_store, "SWEEP_SECONDS", 0.01)
    store, calls, engine = new_store()
    idle, busy, watched, young = (open_tape(store, time_to_live_seconds=ttl) for ttl in (0.02, 0.02, 0.02, 60))
    running = await calls.start(CallRequest([1]), busy)
    watched.watcher_count = 1
    sweep = asyncio.create_task(store.sweep_forever())
    async with asyncio.timeout(5):
        while not idle.sealed:
            await idle.wait_changed()
    # The others have been idle for as long.
    await asyncio.sleep(0.05)
    for tape in (busy, watched, young):
        assert store.writable(tape.tape_id) is tape
    with pytest.raises(NotFound):
        store.writable(idle.tape_id)
    engine.finish(running.call_id, 5)
    async with asyncio.timeout(5):
        while not busy.sealed:
            await busy.wait_changed()
    sweep.cancel()
