"""Clients that read completions from a server as fast as they can, in processes of their own.

Every request asks for a given number of tokens with the log-probability of each, and every answer is checked to have
just that: a server that drops or repeats a token gives no figure. `run` spreads the load over processes, so that the
client is not what is measured.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import socket
import struct
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, cast

from bench.grpc_clients import GenerateClient, GenerateManyClient, SmgClient, WholeSmg
from bench.http_clients import (
    ChatClient,
    HttpClient,
    TokensClient,
    WholeChat,
    WholeCompletions,
    WholeTokens,
)
from bench.readings import Client, Load, Readings
from bench.rust_grpc import RustGrpcClient

_PROMPT_IDS = range(1000, 40_000)
_SETTLE_SECONDS = 0.3
_TCP_INFO_BYTES_RECEIVED = struct.Struct("=128xQ")

CLIENTS: dict[str, type[Client]] = {
    "generate": GenerateClient,
    "generate-many": GenerateManyClient,
    "completions": HttpClient,
    "completions, whole": WholeCompletions,
    "chat": ChatClient,
    "chat, whole": WholeChat,
    "tokens": TokensClient,
    "tokens, whole": WholeTokens,
    "rust-grpc": RustGrpcClient,
    "smg": SmgClient,
    "smg, whole": WholeSmg,
}


def run(load: Load) -> Readings:
    """Put `load` on the server at its address and return what its processes saw. Raises what a client raised first."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Any] = []
    processes: list[SpawnProcess] = []
    for index in range(min(load.processes, load.streams)):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_process, args=(load, index, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        for pipe in pipes:
            _receive(pipe, load.give_up_seconds)
        go_at = time.monotonic() + _SETTLE_SECONDS
        for pipe in pipes:
            pipe.send(go_at)
        return Readings.joined([_receive(pipe, load.give_up_seconds) for pipe in pipes])
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _receive(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise TimeoutError(f"a client has said nothing for {seconds:.0f} s")
    said = pipe.recv()
    if isinstance(said, str):
        raise RuntimeError(said)
    return said


def _process(load: Load, index: int, pipe: Connection) -> None:
    try:
        pipe.send(asyncio.run(_clients(load, index, pipe)))
    except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
        first = _first(error)
        pipe.send(f"client {index}: {type(first).__name__}: {first}")


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group of them."""
    if isinstance(error, BaseExceptionGroup):
        return _first(cast("BaseExceptionGroup[BaseException]", error).exceptions[0])
    return error


async def _clients(load: Load, index: int, pipe: Connection) -> Readings:
    if load.site:
        sys.path.append(load.site)
    make = CLIENTS[load.kind]
    shared = make.shared(load)
    streams = len(range(index, load.streams, load.processes))
    clients = [make(load, shared) for _ in range(streams)]
    # Another prompt for every request that the machine ever sees: no server has it in its cache.
    ids = random.Random(f"{os.getpid()}-{time.monotonic_ns()}")
    prompts = [[ids.choices(_PROMPT_IDS, k=load.prompt_tokens) for _ in range(load.rounds)] for _ in clients]
    pipe.send(None)
    go_at = pipe.recv()
    await asyncio.sleep(go_at - time.monotonic())
    readings = Readings(began=go_at)
    async with asyncio.TaskGroup() as tasks:
        for client, own in zip(clients, prompts, strict=True):
            tasks.create_task(_stream(client, own, readings))
    readings.ended = time.monotonic()
    readings.bytes_received = _bytes_received(load.address)
    return readings


async def _stream(client: Client, prompts: list[list[int]], readings: Readings) -> None:
    for prompt in prompts:
        await client.request(prompt, readings)


def _bytes_received(address: str) -> int:
    """Return what this process's connections to `address` have received, as the system counts it."""
    port, total = int(address.rpartition(":")[2]), 0
    for name in os.listdir("/proc/self/fd"):
        if not _is_socket(name):
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += _TCP_INFO_BYTES_RECEIVED.unpack_from(info)[0]
    return total


def _is_socket(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:
        return False
