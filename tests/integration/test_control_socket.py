"""The control socket: this user's alone, never taken from a sidecar that serves, and gone with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.controlled import Controller
from support.engines import ManualEngine
from support.scripted import call, run_sidecar, script, scripted_arguments, sidecar_on, sidecar_process, tokens
from support.sidecar_client import SidecarClient
from support.waiting import eventually
from tokentape.listen import ListenAddress, UnixAddress
from tokentape_sidecar.listener import AddressInUse, Listener
from tokentape_sidecar.server import Sidecar


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short one: a socket's path has room for 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="tokentape-") as made:
        yield Path(made)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def start(control: Path) -> Sidecar:
    return await Sidecar.start(
        ManualEngine(),
        data=Listener(ListenAddress("127.0.0.1", 0)),
        name="main",
        control=Listener(UnixAddress(control)),
    )


async def test_the_socket_and_its_directory_are_this_users_alone_and_it_goes_at_the_end(directory: Path) -> None:
    socket = directory / "run" / "control.sock"
    async with sidecar_on(ManualEngine(), control=Listener(UnixAddress(socket))) as running:
        assert (mode_of(socket), mode_of(socket.parent)) == (0o600, 0o700)
        assert running.sidecar.control_address == f"unix:{socket}"
        # Controls and data are not served in one place.
        assert not await serves_controls(running.sidecar.address)
        assert await serves_controls(f"unix:{socket}")
    assert not socket.exists()


async def serves_controls(address: str) -> bool:
    controller = Controller(address)
    try:
        return await controller.phase() == "RUNNING"
    except Exception:  # noqa: BLE001 - whatever it says, it is no answer
        return False
    finally:
        await controller.channel.close()


async def test_a_second_sidecar_does_not_take_the_socket_of_the_first(directory: Path) -> None:
    socket = directory / "control.sock"
    first = await start(socket)
    with pytest.raises(AddressInUse, match=rf"^cannot listen on unix:{socket}: another process serves there$"):
        await start(socket)
    assert await serves_controls(f"unix:{socket}")
    await first.stop(grace_seconds=0)
    second = await start(socket)
    assert await serves_controls(f"unix:{socket}")
    await second.stop(grace_seconds=0)


async def test_what_stops_does_not_take_the_socket_of_its_successor(directory: Path) -> None:
    socket = directory / "control.sock"
    first = await start(socket)
    controller = Controller(f"unix:{socket}")
    # A stream, which the first one gives a moment to end.
    channel: Any = controller.channel
    health: Any = health_pb2_grpc.HealthStub(channel)
    await health.Watch(health_pb2.HealthCheckRequest()).read()
    stopping = asyncio.create_task(first.stop(grace_seconds=0))
    await eventually(lambda: not socket.exists())
    second = await start(socket)
    assert not stopping.done()
    await stopping
    await controller.channel.close()
    assert await serves_controls(f"unix:{socket}")
    await second.stop(grace_seconds=0)
    assert not socket.exists()


async def test_a_socket_that_nobody_takes_connections_from_is_not_taken(directory: Path) -> None:
    path = directory / "control.sock"
    with socket.socket(socket.AF_UNIX) as listening, ExitStack() as queue:
        listening.bind(str(path))
        listening.listen(0)
        with pytest.raises(BlockingIOError):
            connect_often(path, queue)
        with pytest.raises(AddressInUse, match="another process serves there"):
            await start(path)
        assert path.exists()


def connect_often(path: Path, queue: ExitStack) -> None:
    for _ in range(10):
        waiting = queue.enter_context(socket.socket(socket.AF_UNIX))
        waiting.setblocking(False)
        waiting.connect(str(path))


async def test_a_socket_of_another_kind_is_not_taken(directory: Path) -> None:
    path = directory / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(AddressInUse, match="Protocol wrong type for socket"):
            await start(path)
        assert path.exists()


async def test_of_two_that_start_at_once_one_serves(directory: Path) -> None:
    socket = directory / "control.sock"
    started = await asyncio.gather(*(start(socket) for _ in range(4)), return_exceptions=True)
    serving = [sidecar for sidecar in started if isinstance(sidecar, Sidecar)]
    assert [type(error) for error in started if isinstance(error, BaseException)] == [AddressInUse] * 3
    assert await serves_controls(f"unix:{socket}")
    await serving[0].stop(grace_seconds=0)


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
async def test_a_directory_that_lets_others_in_is_refused(directory: Path, mode: int) -> None:
    os.chmod(directory, mode)
    with pytest.raises(AddressInUse, match=rf"lets others in \(mode {mode:o}\): the control socket needs"):
        await start(directory / "control.sock")
    os.chmod(directory, 0o700)


async def test_a_directory_of_somebody_else_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: os.stat(directory).st_uid + 1)
    with pytest.raises(AddressInUse, match="is not a directory of this user"):
        await start(directory / "control.sock")


async def test_a_link_to_a_directory_is_refused(directory: Path) -> None:
    (directory / "real").mkdir(mode=0o700)
    (directory / "link").symlink_to("real")
    with pytest.raises(AddressInUse, match="is not a directory of this user"):
        await start(directory / "link" / "control.sock")


async def test_a_data_port_in_use_leaves_no_control_socket(directory: Path) -> None:
    async with sidecar_on(ManualEngine()) as running:
        taken = ListenAddress.parse(running.sidecar.address)
        with pytest.raises(AddressInUse):
            await Sidecar.start(
                ManualEngine(),
                data=Listener(taken),
                name="main",
                control=Listener(UnixAddress(directory / "control.sock")),
            )
    assert not (directory / "control.sock").exists()


async def test_the_command_serves_controls_where_it_says(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the default name; a second one does not start; a killed one's place is taken; and it ends with SIGTERM."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    socket = directory / "control-here.sock"
    content = script(call(tokens(10, finish="stop")), repeat=True)
    arguments = [*scripted_arguments(content, tmp_path), "--name", "here", "--control", "--weights-root", str(tmp_path)]
    async with sidecar_process(*arguments, directory=tmp_path) as process:
        assert json.loads((tmp_path / "ready.json").read_text())["control"] == f"unix:{socket}"
        assert await serves_controls(f"unix:{socket}")
        assert f" as 'here', controls on unix:{socket}" in process.output
        assert not await serves_controls(process.address)
        second = await asyncio.to_thread(run_sidecar, "--listen", "127.0.0.1:0", *arguments)
        assert (second.returncode, second.stderr.splitlines()[-1]) == (
            1,
            f"tokentape-sidecar: cannot listen on unix:{socket}: another process serves there",
        )
        process.signal(signal.SIGKILL)
        await process.wait(10)
    assert socket.exists()
    async with sidecar_process(*arguments, directory=tmp_path) as process:
        assert await serves_controls(f"unix:{socket}")
        async with SidecarClient(process.address, "here") as client:
            assert (await client.generate()).token_ids() == [10]
        process.signal(signal.SIGTERM)
        assert await process.wait(20) == 0
    assert not socket.exists()


async def test_without_the_option_there_are_no_controls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    content = script(call(tokens(10, finish="stop")))
    async with sidecar_process(*scripted_arguments(content, tmp_path), directory=tmp_path):
        assert "control" not in json.loads((tmp_path / "ready.json").read_text())
    assert not (tmp_path / "run").exists()
