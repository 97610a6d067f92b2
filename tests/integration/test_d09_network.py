"""D09: networks that are not as they should be: no IPv6, odd names, a dead proxy in the environment, Unix sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from support.certificates import Authority
from support.relay import relay_to
from support.scripted import (
    SidecarProcess,
    call,
    run_sidecar,
    script,
    scripted_arguments,
    sidecar_process,
    tokens,
)
from support.sidecar_client import SidecarClient
from tokentape.listen import ListenAddress

ANSWER = [34, 35, 2]
SCRIPT = script(call(tokens(*ANSWER, finish="stop")), repeat=True, vocab_size=49152, max_model_len=256)


@asynccontextmanager
async def sidecar_at(listen: str, directory: Path, name: str = "main") -> AsyncGenerator[SidecarProcess]:
    arguments = [*scripted_arguments(SCRIPT, directory), "--listen", listen, "--name", name]
    async with sidecar_process(*arguments, directory=directory) as process:
        yield process


async def generated_at(address: str) -> list[int]:
    async with SidecarClient(address) as client:
        return (await client.generate()).token_ids()


async def completed_on_tape(http: httpx.AsyncClient, address: str, name: str) -> list[int]:
    """Ask the bridge, which must find the sidecar by the tape that it holds."""
    async with SidecarClient(address, name) as client:
        tape = await client.open_tape()
    body = {"prompt": "hi", "max_tokens": 10, "return_token_ids": True, "metadata": {"tape_id": tape.tape_id}}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


# Far away, or a busy machine


async def test_a_connection_that_takes_a_second_is_one_D09(tmp_path: Path) -> None:
    async with sidecar_at("127.0.0.1:0", tmp_path) as process, relay_to(process.address) as relay:
        relay.stall()
        asyncio.get_running_loop().call_later(1.0, relay.flow)
        assert await generated_at(relay.address) == ANSWER


# Without IPv6

OFF = 'ip link set lo up && echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 && exec "$@"'
WITHOUT_IPV6 = ["unshare", "--net", "--map-root-user", "sh", "-c", OFF, "sh"]
"""Runs what follows in a network of its own, whose only interface has no IPv6."""

SERVE_AND_DIAL = """
    import asyncio, sys
    from pathlib import Path

    from support.scripted import sidecar_process
    from tokentape.access import Access
    from tokentape.channel import dial
    from tokentape.v1 import generation_pb2, generation_pb2_grpc

    async def main(directory, ca, token, *arguments):
        async with sidecar_process(*arguments, directory=Path(directory)) as process:
            access = Access(token_file=Path(token), ca_file=Path(ca)) if ca else Access()
            async with dial(process.address, access) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                print(process.address.rpartition(":")[0], (await stub.GetModel(generation_pb2.GetModelRequest())).name)

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def without_ipv6() -> list[str]:
    tried = subprocess.run([*WITHOUT_IPV6, "cat", "/proc/net/if_inet6"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"this machine lets nobody turn IPv6 off for a process: {tried.stderr.strip()}")
    assert tried.stdout == ""
    return WITHOUT_IPV6


def serve_and_dial(prefix: list[str], checkout: Path, *arguments: str) -> str:
    """Start a sidecar and call it at the address that it shows; return that, and what it serves."""
    ended = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(SERVE_AND_DIAL), *arguments],
        env={**os.environ, "PYTHONPATH": str(checkout / "tests")},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("ipv6", [True, False])
def test_all_interfaces_are_those_that_there_are_and_the_address_shown_is_one_D09(
    tmp_path: Path, checkout: Path, ipv6: bool, request: pytest.FixtureRequest
) -> None:
    prefix: list[str] = [] if ipv6 else request.getfixturevalue("without_ipv6")
    authority = Authority(tmp_path / "tls")
    server = authority.sign("::", "0.0.0.0")
    (token := tmp_path / "token").write_text("a-token-of-some-length\n")
    token.chmod(0o600)
    arguments = [*scripted_arguments(SCRIPT, tmp_path), "--listen", "[::]:0", "--token-file", str(token)]
    arguments += ["--tls-certificate", str(server.certificate), "--tls-key", str(server.key)]
    said = serve_and_dial(prefix, checkout, str(tmp_path), str(authority.ca_file), str(token), *arguments)
    assert said == ("[::] toy\n" if ipv6 and socket.has_ipv6 else "0.0.0.0 toy\n")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_names_of_this_machine_serve_without_ipv6_D09(
    tmp_path: Path, checkout: Path, host: str, without_ipv6: list[str]
) -> None:
    arguments = [*scripted_arguments(SCRIPT, tmp_path), "--listen", f"{host}:0"]
    assert serve_and_dial(without_ipv6, checkout, str(tmp_path), "", "", *arguments) == f"{host} toy\n"


def test_an_ipv6_address_where_there_is_none_is_one_clear_line_D09(tmp_path: Path, without_ipv6: list[str]) -> None:
    command = [*without_ipv6, str(Path(sys.executable).with_name("tokentape-sidecar"))]
    command += [*scripted_arguments(SCRIPT, tmp_path), "--listen", "[::1]:0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "tokentape-sidecar: --listen: cannot listen on [::1]:0: Cannot assign requested address\n"


def test_a_host_that_nobody_knows_is_one_clear_line_D09(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("none of them is read before the address is tried")
    guarded = [arg for option in ("--tls-certificate", "--tls-key", "--token-file") for arg in (option, str(secret))]
    arguments = [*scripted_arguments(SCRIPT, tmp_path), "--listen", "no-such-host.invalid:0", *guarded]
    ended = run_sidecar(*arguments)
    assert ended.returncode == 1
    assert ended.stderr.startswith("tokentape-sidecar: --listen: cannot listen on no-such-host.invalid:0: ")
    assert ended.stderr.count("\n") == 1


# localhost, Unix sockets, and a proxy in the environment

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> str:
    """A proxy that nobody serves, for all that is started from here on."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        proxy = f"http://127.0.0.1:{unused.getsockname()[1]}"
    for name in PROXIES:
        monkeypatch.setenv(name, proxy)
        monkeypatch.setenv(name.upper(), proxy)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    return proxy


@pytest.fixture
def short_directory() -> Generator[Path]:
    """A directory whose sockets' paths are short enough, wherever tests have theirs."""
    with tempfile.TemporaryDirectory(prefix="tt-") as directory:
        yield Path(directory)


@pytest.mark.timeout(120)
async def test_localhost_and_unix_sockets_are_reached_whatever_proxy_there_is_D09(
    dead_proxy: str, tmp_path: Path, short_directory: Path
) -> None:
    from integration.conftest import START_SECONDS, ServerProcess  # noqa: PLC0415 - a conftest

    async with httpx.AsyncClient() as proxied:
        with pytest.raises(httpx.ConnectError):
            await proxied.get("http://192.0.2.1/", timeout=5)
    path = short_directory / "sidecar.sock"
    (tmp_path / "unix").mkdir()
    async with (
        sidecar_at("localhost:0", tmp_path, "named") as named,
        sidecar_at(f"unix:{path}", tmp_path / "unix", "unix") as unix,
    ):
        assert named.address.startswith("localhost:")
        port = ListenAddress.parse(named.address).port
        assert unix.address == f"unix:{path}"
        for address in (named.address, f"127.0.0.1:{port}", unix.address):
            assert await generated_at(address) == ANSWER
        command = ["tokentape-bridge", "--listen", "localhost:0"]
        command += ["--sidecar", f"named={named.address}", "--sidecar", f"unix={unix.address}"]
        with ServerProcess(command, tmp_path) as bridge:
            address = await asyncio.to_thread(lambda: bridge.address)
            assert address.startswith("localhost:")
            async with (
                asyncio.timeout(START_SECONDS),
                httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=20) as http,
            ):
                serving = {"named": "SERVING", "unix": "SERVING"}
                while (await http.get("/health")).json().get("sidecars") != serving:  # noqa: ASYNC110 - another process's
                    await asyncio.sleep(0.1)
                assert await completed_on_tape(http, named.address, "named") == ANSWER
                assert await completed_on_tape(http, unix.address, "unix") == ANSWER
            assert dead_proxy.rpartition(":")[2] not in bridge.log
        unix.signal(signal.SIGTERM)
        assert await unix.wait(20) == 0
    assert not path.exists()


async def test_the_socket_of_a_killed_sidecar_is_taken_and_that_of_a_live_one_is_not_D09(
    tmp_path: Path, short_directory: Path
) -> None:
    path = short_directory / "sidecar.sock"
    async with sidecar_at(f"unix:{path}", tmp_path) as killed:
        killed.kill()
    assert path.is_socket()
    async with sidecar_at(f"unix:{path}", tmp_path) as process:
        second = await asyncio.to_thread(
            run_sidecar, *scripted_arguments(SCRIPT, tmp_path), "--listen", process.address
        )
        assert second.returncode == 1
        assert second.stderr == f"tokentape-sidecar: cannot listen on unix:{path}: another process serves there\n"
        assert await generated_at(process.address) == ANSWER


def test_a_path_that_no_socket_can_have_is_told_D09(tmp_path: Path, short_directory: Path) -> None:
    arguments = scripted_arguments(SCRIPT, tmp_path)
    too_long = run_sidecar(*arguments, "--listen", f"unix:/{'x' * 107}")
    assert too_long.returncode == 2
    assert "is longer than the 107 bytes of a socket's path" in too_long.stderr
    relative = run_sidecar(*arguments, "--listen", "unix:sidecar.sock")
    assert relative.returncode == 2
    assert "the path must be absolute" in relative.stderr
    nowhere = short_directory / "none" / "sidecar.sock"
    missing = run_sidecar(*arguments, "--listen", f"unix:{nowhere}")
    assert missing.returncode == 1
    assert f"cannot listen on unix:{nowhere}: {nowhere.parent}: No such file or directory\n" in missing.stderr


def test_what_is_no_socket_is_left_alone_D09(tmp_path: Path, short_directory: Path) -> None:
    (file := short_directory / "notes.txt").write_text("mine")
    ended = run_sidecar(*scripted_arguments(SCRIPT, tmp_path), "--listen", f"unix:{file}")
    assert ended.returncode == 1
    assert f"tokentape-sidecar: cannot listen on unix:{file}: " in ended.stderr
    assert file.read_text() == "mine"
