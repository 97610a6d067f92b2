"""A node's keeper and bridge, as its members come, go and die, and as they themselves die. Real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from support.nodes import bridges, files_of, is_alive, keepers, member_process, own_temporary_directory, processes_of
from support.scripted import RunningSidecar, call, scripted_sidecar, tokens
from support.waiting import eventually
from tokentape_executor.errors import PolicyUnavailable, StartFailed
from tokentape_executor.node import NodeMember, NodeSpec
from tokentape_executor.node.places import Place

SPEC = NodeSpec(group="test", bridge_options=(), gym=None, log_directory=None, start_timeout_seconds=30.0)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    tmp_path_factory.getbasetemp()  # which would else be made in there
    with own_temporary_directory(monkeypatch) as directory:
        yield directory


@pytest.fixture
async def sidecar(model_directory: Path) -> AsyncGenerator[RunningSidecar]:
    answer = call(tokens(104, 105, finish="stop"))
    async with scripted_sidecar(answer, repeat=True, tokenizer=model_directory, vocab_size=49152) as running:
        yield running


async def version(url: str) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
        return (await http.get(url.removesuffix("/v1") + "/version")).status_code


async def leave(*members: NodeMember) -> None:
    await asyncio.gather(*(asyncio.to_thread(member.leave) for member in members))


def table_file(root: Path) -> Path:
    (file,) = root.glob("*/*/sidecars.json")
    return file


def table(root: Path) -> dict[str, str]:
    return json.loads(table_file(root).read_text())


async def test_eight_processes_that_join_at_once_share_one_keeper_and_one_bridge(
    root: Path, sidecar: RunningSidecar
) -> None:
    names = {"main": sidecar.sidecar.address}
    async with AsyncExitStack() as stack:
        members = [await stack.enter_async_context(member_process(SPEC, names)) for _ in range(8)]
        urls = await asyncio.gather(*(member.ask("bridge_url") for member in members))
        assert len(set(urls)) == 1
        assert await version(urls[0]) == 200
        assert len(keepers(root)) == len(bridges(root)) == 1
        await asyncio.gather(*(member.leave() for member in members[:-1]))
        assert await version(urls[0]) == 200
        await members[-1].leave()
        with pytest.raises(httpx.ConnectError):
            await version(urls[0])
        assert processes_of(root) == []


async def test_the_keeper_is_no_child_of_whoever_started_it(root: Path, sidecar: RunningSidecar) -> None:
    names = {"main": sidecar.sidecar.address}
    async with member_process(SPEC, names) as first:
        url = await first.ask("bridge_url")
        second = await NodeMember.join(SPEC, names)
        (keeper,) = keepers(root)
        assert os.getsid(keeper.pid) == os.getpgid(keeper.pid) == keeper.pid
        assert keeper.ppid() not in {first.process.pid, os.getpid()}
        first.process.kill()
        await first.process.wait()
        assert await second.bridge_url() == url
        assert await version(url) == 200
        await leave(second)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_a_bridge_that_dies_or_hangs_comes_back_at_the_same_address(
    root: Path, sidecar: RunningSidecar, number: signal.Signals
) -> None:
    member = await NodeMember.join(SPEC, {"main": sidecar.sidecar.address})
    url = await member.bridge_url()
    (bridge,) = bridges(root)
    bridge.send_signal(number)
    await eventually(lambda: [new for new in bridges(root) if new != bridge], seconds=50)
    assert await member.bridge_url() == url
    assert await version(url) == 200
    assert not bridge.is_running()
    await leave(member)


async def test_a_leash_that_is_killed_costs_a_restart_and_leaves_nothing(root: Path, sidecar: RunningSidecar) -> None:
    member = await NodeMember.join(SPEC, {"main": sidecar.sidecar.address})
    url = await member.bridge_url()
    (bridge,) = bridges(root)
    left = table_file(root).with_name("tmp") / "left"
    left.write_text("by a bridge that was killed")
    leash = bridge.parent()
    assert leash is not None
    leash.kill()
    await eventually(lambda: [new for new in bridges(root) if new != bridge], seconds=50)
    assert await member.bridge_url() == url
    assert await version(url) == 200
    assert not bridge.is_running()
    assert not left.exists()
    await leave(member)


async def test_a_keeper_that_dies_is_replaced_and_its_bridge_with_it(root: Path, sidecar: RunningSidecar) -> None:
    names = {"main": sidecar.sidecar.address}
    async with member_process(SPEC, names) as other:
        member = await NodeMember.join(SPEC, names)
        await member.bridge_url()
        await other.ask("bridge_url")
        family = [keepers(root)[0], *keepers(root)[0].children(recursive=True)]
        family[0].kill()
        await eventually(lambda: not any(process.is_running() for process in family), seconds=10)
        urls = [await member.bridge_url(), await other.ask("bridge_url")]
        assert urls[0] == urls[1]
        assert await version(urls[0]) == 200
        assert len(keepers(root)) == len(bridges(root)) == 1
        await leave(member)
        await other.leave()


async def test_a_keeper_that_is_told_to_end_is_replaced_too(root: Path, sidecar: RunningSidecar) -> None:
    member = await NodeMember.join(SPEC, {"main": sidecar.sidecar.address})
    await member.bridge_url()
    (keeper,) = keepers(root)
    keeper.terminate()
    await eventually(lambda: not keeper.is_running(), seconds=10)
    assert await version(await member.bridge_url()) == 200
    await leave(member)


async def test_a_member_that_dies_takes_its_sidecar_from_the_table(root: Path, sidecar: RunningSidecar) -> None:
    async with scripted_sidecar(call(tokens(1, finish="stop")), repeat=True) as two:
        member = await NodeMember.join(SPEC, {"main": sidecar.sidecar.address})
        url = await member.bridge_url()
        async with member_process(SPEC, {"other": two.sidecar.address}) as other:
            # Its sidecar is named "main", so that it is reached and found to be another's.
            await eventually(lambda: "other" in table(root), seconds=20)
            other.process.kill()
            await other.process.wait()
            await eventually(lambda: table(root) == {"main": sidecar.sidecar.address})
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"messages": [{"role": "user", "content": "x"}], "metadata": {"tape_id": f"other.{'0' * 32}"}}
            answer = await http.post(f"{url}/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_sidecar")
        await leave(member)


async def test_sidecars_come_to_a_bridge_that_runs(root: Path, sidecar: RunningSidecar) -> None:
    member = await NodeMember.join(SPEC, {"main": sidecar.sidecar.address})
    url = await member.bridge_url()
    (bridge,) = bridges(root)
    again = await NodeMember.join(SPEC, {"main": sidecar.sidecar.address})
    assert await again.bridge_url() == url
    assert bridges(root) == [bridge]
    tape = await sidecar.client.open_tape()
    await leave(member)
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        body = {"messages": [{"role": "user", "content": "x"}], "metadata": {"tape_id": tape.tape_id}}
        answer = await http.post(f"{url}/chat/completions", json=body)
    assert answer.is_success, answer.text
    await leave(again)


async def test_another_sidecar_of_the_same_name_is_refused(root: Path, sidecar: RunningSidecar) -> None:
    member = await NodeMember.join(SPEC, {"main": sidecar.sidecar.address})
    with pytest.raises(StartFailed, match=r"a sidecar named 'main' is in this node's group already, at 127\.0\.0\.1:"):
        await NodeMember.join(SPEC, {"main": "127.0.0.1:9"})
    await member.bridge_url()
    await leave(member)


async def test_the_last_one_that_leaves_returns_when_all_has_ended(root: Path, sidecar: RunningSidecar) -> None:
    member = await NodeMember.join(SPEC, {"main": sidecar.sidecar.address})
    await member.bridge_url()
    family = processes_of(root)
    assert len(family) == 3
    began = time.monotonic()
    await leave(member)
    assert time.monotonic() - began < 4.0
    assert not any(is_alive(process) for process in family)
    assert files_of(root) == []
    await leave(member)
    with pytest.raises(PolicyUnavailable, match="was shut down"):
        await member.bridge_url()


async def test_whoever_comes_while_it_ends_gets_a_new_one(root: Path, sidecar: RunningSidecar) -> None:
    names = {"main": sidecar.sidecar.address}
    for _ in range(3):
        member = await NodeMember.join(SPEC, names)
        await member.bridge_url()
        leaving = asyncio.create_task(asyncio.to_thread(member.leave))
        new = await NodeMember.join(SPEC, names)
        await leaving
        assert await version(await new.bridge_url()) == 200
        await leave(new)


async def test_leaving_while_it_starts_is_quick(root: Path, sidecar: RunningSidecar) -> None:
    member = await NodeMember.join(SPEC, {"main": sidecar.sidecar.address})
    waiting = asyncio.create_task(member.bridge_url())
    await asyncio.sleep(0)
    began = time.monotonic()
    await leave(member)
    assert time.monotonic() - began < 4.0
    with pytest.raises(PolicyUnavailable, match="was shut down"):
        await waiting


async def test_a_cancelled_join_leaves_nothing(root: Path, sidecar: RunningSidecar) -> None:
    joining = asyncio.create_task(NodeMember.join(SPEC, {"main": sidecar.sidecar.address}))
    await eventually(lambda: files_of(root), seconds=10)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    await eventually(lambda: not any(thread.name == "node member" for thread in threading.enumerate()), seconds=10)
    await eventually(lambda: not files_of(root), seconds=10)


async def test_a_bridge_that_does_not_start_is_told_with_its_log_and_the_next_join_starts_anew(
    root: Path, sidecar: RunningSidecar
) -> None:
    bad = NodeSpec("test", ("--no-such-option",), None, None, 30.0)
    for _ in range(2):
        member = await NodeMember.join(bad, {"main": sidecar.sidecar.address})
        with pytest.raises(StartFailed, match=r"(?s)bridge ended with status 2 .* arguments: --no-such-option"):
            await member.bridge_url()
        await leave(member)
        await eventually(lambda: not processes_of(root), seconds=10)


async def test_logs_stay_where_they_shall(root: Path, sidecar: RunningSidecar, tmp_path: Path) -> None:
    spec = NodeSpec("test", (), None, tmp_path / "logs", 30.0)
    member = await NodeMember.join(spec, {"main": sidecar.sidecar.address})
    await member.bridge_url()
    await leave(member)
    assert {file.name for file in (tmp_path / "logs").iterdir()} == {"bridge.log", "node.log"}
    assert "serving at http://" in (tmp_path / "logs" / "bridge.log").read_text()


async def test_what_killed_ones_left_is_swept_by_the_next(root: Path, sidecar: RunningSidecar) -> None:
    names = {"main": sidecar.sidecar.address}
    async with member_process(SPEC, names) as member:
        await member.ask("bridge_url")
        (keeper,) = keepers(root)
        (directory,) = (file for file in files_of(root) if file.parent.parent == root)
        member.process.kill()
        keeper.kill()
        await member.process.wait()
    await eventually(lambda: not processes_of(root), seconds=10)
    assert directory.exists()
    other = await NodeMember.join(NodeSpec("other", (), None, None, 30.0), names)
    await eventually(lambda: not directory.exists(), seconds=10)
    await leave(other)


async def test_groups_have_nothing_in_common(root: Path, sidecar: RunningSidecar) -> None:
    specs = [NodeSpec(group, (), None, None, 30.0) for group in ("one", "two")]
    members = await asyncio.gather(*(NodeMember.join(spec, {"main": sidecar.sidecar.address}) for spec in specs))
    urls = await asyncio.gather(*(member.bridge_url() for member in members))
    assert len(set(urls)) == len(keepers(root)) == 2
    await leave(*members)


async def test_a_keeper_that_nobody_joins_ends(root: Path) -> None:
    place = Place.of(SPEC.key)
    impatient = "from tokentape_executor.node import keeper; keeper.JOIN_SECONDS = 0.5; keeper.main()"
    with place.locked(lambda: True, 10):
        place.spec.write_bytes(SPEC.to_json())
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", impatient, str(place.directory))
        await eventually(lambda: place.socket in files_of(root), seconds=30)
    assert await asyncio.wait_for(process.wait(), 40) == 0
    assert files_of(root) == []
