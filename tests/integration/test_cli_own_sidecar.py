"""The sidecar that `tokentape-rollout --model` starts and keeps running; here a scripted one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from support.scripted import Json, call, script, scripted_arguments, tokens
from support.waiting import eventually
from tokentape_executor.cli.own_sidecar import OwnSidecar
from tokentape_executor.cli.sidecar import Health, Sidecar
from tokentape_executor.errors import StartFailed
from tokentape_executor.services import ServiceGroup
from tokentape_executor.settings import ExecutorSettings

SCRIPT: Json = script(call(tokens(1, finish="stop")), repeat=True)


def sidecar_processes() -> list[psutil.Process]:
    """The sidecars below this process, without their leashes."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "console import sidecar" in " ".join(process.cmdline()) and "_leash" not in " ".join(process.cmdline())
    ]


async def test_it_is_started_again_at_the_same_address_under_the_same_name(tmp_path: Path) -> None:
    group = ServiceGroup(None)
    own = OwnSidecar(scripted_arguments(SCRIPT, tmp_path), group, ExecutorSettings())
    try:
        await own.start()
        address = own.address
        sidecar = await Sidecar.connect(address, timeout_seconds=10, time_to_live_seconds=60)
        changes: list[Health] = []
        keeping = [
            asyncio.create_task(own.keep_running(sidecar)),
            asyncio.create_task(sidecar.follow(lambda: changes.append(sidecar.health))),
        ]
        (process,) = sidecar_processes()
        process.kill()
        await eventually(lambda: changes == [Health.AWAY, Health.SERVING], seconds=30)
        assert own.address == address
        again = await Sidecar.connect(address, timeout_seconds=10, time_to_live_seconds=60)
        assert again.name == sidecar.name
        assert own.problem == ""
        for task in keeping:
            task.cancel()
        await asyncio.wait(keeping)
        await sidecar.channel.close()
        await again.channel.close()
    finally:
        await asyncio.to_thread(group.stop)
    assert sidecar_processes() == []


async def test_what_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    group = ServiceGroup(None)
    own = OwnSidecar(
        ["--engine", "scripted", "--script", "none", "--tokenizer", str(tmp_path)], group, ExecutorSettings()
    )
    try:
        with pytest.raises(StartFailed, match=r"the sidecar ended with status 1 (?s:.)*cannot read the script none"):
            await own.start()
    finally:
        await asyncio.to_thread(group.stop)
