"""The parts of a node that need no process: specs, directories, ports, and values shared between threads and loops."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.waiting import eventually
from tokentape_executor.errors import StartFailed
from tokentape_executor.node import logs
from tokentape_executor.node.messages import Join, State, parse
from tokentape_executor.node.places import Place, sweep
from tokentape_executor.node.ports import reserved
from tokentape_executor.node.shared import Shared
from tokentape_executor.node.spec import AttachedGym, GymSpec, NodeSpec
from tokentape_executor.settings import ExecutorSettings

GYM = GymSpec(Path("/venv"), ("a.yaml", "b.yaml"), ("++a=1",), "toy")
SPEC = NodeSpec("g", ("--renderer", "qwen3"), GYM, Path("/logs"), 120.0)


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, gym=None), replace(SPEC, gym=AttachedGym("http://h:1", "toy"))])
def test_a_spec_reaches_the_keeper_as_it_is(spec: NodeSpec) -> None:
    assert NodeSpec.from_json(spec.to_json()) == spec


def test_only_what_is_shared_has_one_key() -> None:
    others = [
        replace(SPEC, group="h"),
        replace(SPEC, bridge_options=("--renderer qwen3",)),
        replace(SPEC, gym=replace(GYM, overrides=())),
        replace(SPEC, gym=replace(GYM, policy_model_name="other")),
        replace(SPEC, gym=None),
        replace(SPEC, log_directory=None),
    ]
    keys = {spec.key for spec in [SPEC, *others]}
    assert len(keys) == 1 + len(others)
    assert replace(SPEC).key in keys


def test_settings_say_which_gym() -> None:
    settings = ExecutorSettings(gym_venv=Path("venv"), log_directory=Path("logs"), bridge_options=("-x",))
    started = NodeSpec.from_settings(settings, group="g", policy_model_name="toy")
    assert started.gym == GymSpec(Path("venv").absolute(), settings.gym_configs, (), "toy")
    assert (started.log_directory, started.bridge_options) == (Path("logs").absolute(), ("-x",))
    assert NodeSpec.from_settings(settings, group="g", policy_model_name=None).gym is None
    attached = NodeSpec.from_settings(replace(settings, gym_url="http://h:1"), group="g", policy_model_name="toy")
    assert attached.gym == AttachedGym("http://h:1", "toy")


@pytest.mark.parametrize("option", [("--api-key-file", "keys"), ("--api-key-file=keys",)])
def test_a_nodes_bridge_asks_for_no_key(option: tuple[str, ...]) -> None:
    with pytest.raises(StartFailed, match="TOKENTAPE_BRIDGE_OPTIONS: --api-key-file"):
        NodeSpec.from_settings(ExecutorSettings(bridge_options=option), group="g", policy_model_name=None)


async def test_a_log_that_grows_too_long_begins_anew_and_its_writer_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(logs, "LONGEST_BYTES", 1000)
    monkeypatch.setattr(logs, "LOOK_SECONDS", 0.05)
    (tmp_path / "other.log").write_bytes(b"x" * 2000)
    bounding = asyncio.create_task(logs.bound_logs(tmp_path))
    with (tmp_path / logs.BRIDGE).open("ab", buffering=0) as log:
        log.write(b"a" * 900 + b"\n")
        await asyncio.sleep(0.2)
        assert os.fstat(log.fileno()).st_size == 901
        log.write(b"b" * 900)
        await eventually(lambda: os.fstat(log.fileno()).st_size == 0)
        log.write(b"c")
    bounding.cancel()
    await asyncio.wait({bounding})
    assert (tmp_path / logs.BRIDGE).read_bytes() == b"c"
    assert (tmp_path / f"{logs.BRIDGE}.1").read_bytes() == b"a" * 900 + b"\n" + b"b" * 900
    assert sorted(os.listdir(tmp_path)) == [logs.BRIDGE, f"{logs.BRIDGE}.1", "other.log"]


def test_a_message_is_one_line() -> None:
    state = State(bridge_url="http://h:1/v1", served=("a",), agents={"x": "y"}, gym_problem="one\ntwo")
    assert state.line().count(b"\n") == 1
    assert parse(State, state.line()) == state
    with pytest.raises(ValueError, match="sidecars"):
        parse(Join, b"{}\n")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose path is short enough for a socket's, which pytest's own need not be."""
    with tempfile.TemporaryDirectory(prefix="nd-", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


def test_a_place_is_this_users_alone(temporary: Path) -> None:
    place = Place.of("0" * 16)
    with place.locked(lambda: True, 1):
        for directory in (place.directory, place.directory.parent):
            assert directory.stat().st_mode & 0o777 == 0o700
        assert place.directory.parent == temporary / f"tokentape-{os.getuid()}"
        assert place.connect() is None
        place.remove()
    assert list(temporary.iterdir()) == []


def test_a_directory_that_others_may_write_to_is_refused(temporary: Path) -> None:
    (temporary / f"tokentape-{os.getuid()}").mkdir()
    with (
        pytest.raises(StartFailed, match="is not a directory of this user alone"),
        Place.of("0" * 16).locked(lambda: True, 1),
    ):
        pass


def test_a_lock_that_is_held_is_waited_for(temporary: Path) -> None:
    place = Place.of("0" * 16)
    with place.locked(lambda: True, 1):
        failures: list[str] = []

        def wait(go_on: bool) -> None:
            try:
                with place.locked(lambda: go_on, 0.1):
                    pass
            except StartFailed as error:
                failures.append(str(error))

        for go_on in (True, False):
            thread = threading.Thread(target=wait, args=(go_on,))
            thread.start()
            thread.join()
    assert "is held by another process for 0.1 s" in failures[0]
    assert failures[1] == "it was shut down while it started"


def test_a_lock_that_was_removed_while_it_was_waited_for_is_not_held(temporary: Path) -> None:
    place = Place.of("0" * 16)
    inodes: list[int] = []

    def take() -> None:
        with place.locked(lambda: True, 10):
            inodes.append((place.directory / "lock").stat().st_ino)

    waiting = threading.Thread(target=take)
    with place.locked(lambda: True, 1):
        waiting.start()
        place.remove()
    waiting.join()
    assert len(inodes) == 1


def test_a_long_temporary_directory_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 80)
    assert len(str(Place.of("0" * 16).socket)) < 107
    assert str(Place.of("0" * 16).socket).startswith("/tmp/")


def test_only_what_nobody_uses_is_swept(temporary: Path) -> None:
    dead, locked, alive = (Place.of(letter * 16) for letter in "abc")
    for place in (dead, locked, alive):
        with place.locked(lambda: True, 1):
            place.spec.write_bytes(b"")
    with socket.socket(socket.AF_UNIX) as gone, socket.socket(socket.AF_UNIX) as keeper:
        gone.bind(str(dead.socket))
        keeper.bind(str(alive.socket))
        keeper.listen()
        with locked.locked(lambda: True, 1):
            sweep()
        assert [place.directory.exists() for place in (dead, locked, alive)] == [False, True, True]
    sweep()
    assert list(temporary.iterdir()) == []


def test_a_reserved_port_is_nobody_elses_and_can_be_served_again_and_again() -> None:
    with reserved() as address:
        for _ in range(3):
            with socket.create_server((address.host, address.port)) as server:
                with socket.create_connection((address.host, address.port)) as client:
                    accepted, _ = server.accept()
                    accepted.close()
                    assert client.recv(1) == b""
                with pytest.raises(OSError, match="in use"), reserved(address.host, address.port):
                    pass
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((address.host, address.port))


async def test_a_shared_value_wakes_waiters_of_every_loop() -> None:
    shared = Shared(0)

    def elsewhere() -> int:
        return asyncio.run(shared.wait_for(lambda value: value if value > 1 else None))

    waiting = [asyncio.create_task(asyncio.to_thread(elsewhere)) for _ in range(2)]
    here = asyncio.create_task(shared.wait_for(lambda value: value or None))
    cancelled = asyncio.create_task(shared.wait_for(lambda value: value or None))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    threading.Thread(target=lambda: shared.update(lambda _: 1)).start()
    assert await here == 1
    shared.update(lambda value: value + 1)
    assert await asyncio.gather(*waiting) == [2, 2]
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_what_a_waiter_raises_is_raised_to_it_alone() -> None:
    shared = Shared(0)

    def refuse(value: int) -> int | None:
        if value:
            raise ValueError("no")
        return None

    failing = asyncio.create_task(shared.wait_for(refuse))
    await asyncio.sleep(0)
    shared.update(lambda _: 1)
    with pytest.raises(ValueError, match="no"):
        await failing
    assert shared.value == 1
