"""`tokentape-watch` as a process, on a scripted sidecar: what it shows, what ends it, what it says when it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf.json_format import ParseDict

from support.scripted import Json, RunningSidecar, call, scripted_sidecar, tokens
from support.sidecar_client import OpenedTape
from support.waiting import eventually
from tokentape.v1 import tape_pb2
from tokentape_executor.tape_client import OpenedTape as ExecutorTape
from tokentape_executor.tape_file import append_tape, download

pytestmark = pytest.mark.timeout(120)

WATCH = str(Path(sys.executable).with_name("tokentape-watch"))
SECONDS = 40
SLOW = 60_000


def answer(*more: Json) -> Json:
    """A call that samples "hi", then what `more` says."""
    return call(tokens(104, 105, weight_version="1"), *(more or [tokens(33, finish="stop", weight_version="2")]))


@dataclass
class Watch:
    """A running `tokentape-watch`."""

    process: asyncio.subprocess.Process
    out: Path
    errors: Path

    @property
    def output(self) -> str:
        return self.out.read_text()

    async def until(self, condition: Callable[[str], object]) -> None:
        """Wait until what it has written fits."""
        await eventually(lambda: condition(self.output) or self.process.returncode is not None, SECONDS)
        assert condition(self.output), f"{self.output}\n{self.errors.read_text()}"

    async def end(self, status: int) -> str:
        """Wait for its end, and return what it said of errors."""
        async with asyncio.timeout(SECONDS):
            assert await self.process.wait() == status, f"{self.output}\n{self.errors.read_text()}"
        return self.errors.read_text()


@dataclass
class Bench:
    """A sidecar, a file of reader tokens, and a place to run the command in."""

    running: RunningSidecar
    directory: Path

    @property
    def readers(self) -> Path:
        return self.directory / "readers"

    async def open_tape(self) -> OpenedTape:
        tape = await self.running.client.open_tape()
        self.add(tape.tape_id, tape.reader_token)
        return tape

    def add(self, tape_id: str, reader_token: str, address: str | None = None) -> None:
        with self.readers.open("a") as file:
            file.write(f"{tape_id} {reader_token} {address or self.running.sidecar.address}\n")

    async def generate(self, tape: OpenedTape) -> None:
        await self.running.client.generate([97, 98], tape_id=tape.tape_id)

    @contextlib.asynccontextmanager
    async def watch(self, *options: str) -> AsyncGenerator[Watch]:
        out, errors = self.directory / "out", self.directory / "errors"
        with out.open("wb") as stdout, errors.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(WATCH, *options, stdout=stdout, stderr=stderr)
        try:
            yield Watch(process, out, errors)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def following(self, *options: str) -> contextlib.AbstractAsyncContextManager[Watch]:
        return self.watch("--reader-tokens", str(self.readers), *options)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncGenerator[Bench]:
    async with scripted_sidecar(answer(), repeat=True) as running:
        yield Bench(running, tmp_path)


@pytest.fixture
async def slow_bench(tmp_path: Path) -> AsyncGenerator[Bench]:
    """Its calls do not end by themselves."""
    async with scripted_sidecar(answer(tokens(33, delay_ms=SLOW)), repeat=True) as running:
        yield Bench(running, tmp_path)


async def test_a_tape_is_followed_from_its_beginning_to_its_seal(bench: Bench) -> None:
    tape = await bench.open_tape()
    await bench.generate(tape)
    async with bench.following() as watch:
        await watch.until(lambda output: "hi⟦weights 2⟧!" in output)
        await bench.generate(tape)
        await watch.until(lambda output: "call 1" in output)
        await bench.running.client.seal(tape)
        assert await watch.end(0) == ""
    lines = watch.output.splitlines()
    assert "   prompt | ab" in lines
    assert lines.count("  sampled | hi⟦weights 2⟧!") == 2
    assert lines[-1] == "sealed  2 calls, 6 tokens sampled"
    assert "\x1b" not in watch.output


async def test_a_call_is_shown_while_it_runs(slow_bench: Bench) -> None:
    tape = await slow_bench.open_tape()
    making = asyncio.create_task(slow_bench.generate(tape))
    async with slow_bench.following() as watch:
        await watch.until(lambda output: "   prompt | ab" in output)
        await slow_bench.running.client.seal(tape)
        await watch.end(0)
    await making
    assert "          | abort · 2 tokens" in watch.output


async def test_json_lines_are_the_tapes_entries(bench: Bench) -> None:
    tape = await bench.open_tape()
    await bench.generate(tape)
    await bench.running.client.seal(tape)
    async with bench.following("--json", "--ids", "instead") as watch:
        await watch.end(0)
    entries = [ParseDict(json.loads(line), tape_pb2.TapeEntry()) for line in watch.output.splitlines()]
    assert entries == await bench.running.client.entries(tape)
    async with bench.following("--json", "--from", "2") as watch:
        await watch.end(0)
    first = json.loads(watch.output.splitlines()[0])
    assert first["sequence"] == "2"
    assert first["tokens_sampled"]["text_pieces"] == ["i"]


async def test_the_latest_by_itself_another_by_the_beginning_of_its_id(bench: Bench) -> None:
    first, second = await bench.open_tape(), await bench.open_tape()
    await bench.generate(first)
    for tape in (first, second):
        await bench.running.client.seal(tape)
    async with bench.following() as watch:
        await watch.end(0)
    assert "sealed  0 calls" in watch.output
    async with bench.following(first.tape_id[:12]) as watch:
        await watch.end(0)
    assert "sealed  1 call, 3 tokens" in watch.output
    async with bench.following("main.") as watch:
        assert "has 2 tapes whose id begins with main." in await watch.end(2)


async def test_all_tapes_one_after_the_other_also_those_that_come_later(bench: Bench) -> None:
    bench.add(f"main.{'0' * 32}", "of-a-tape-that-is-gone")
    async with bench.following("--all") as watch:
        await watch.until(lambda output: "has no tape main.00000000…" in output)
        for count in (1, 2):
            tape = await bench.open_tape()
            await bench.generate(tape)
            await bench.running.client.seal(tape)
            await watch.until(lambda output, count=count: output.count("sealed  1 call") == count)
        watch.process.send_signal(signal.SIGINT)
        assert await watch.end(130) == ""


async def test_a_connection_that_breaks_again_and_again_costs_nothing(bench: Bench) -> None:
    tape = await bench.open_tape()
    async with (
        breaking_proxy(bench.running.sidecar.address) as (address, connections),
        bench.following("--sidecar", address, "--json", "--ids", "instead") as watch,
    ):
        for turn in range(4):
            await bench.generate(tape)
            await watch.until(lambda output, turn=turn: output.count("choice_finished") == turn + 1)
            for connection in list(connections):
                connection.close()
        await bench.running.client.seal(tape)
        assert await watch.end(0) == ""
    entries = [ParseDict(json.loads(line), tape_pb2.TapeEntry()) for line in watch.output.splitlines()]
    sequences = [
        entry.sequence + index for entry in entries for index in range(len(entry.tokens_sampled.token_ids) or 1)
    ]
    assert sequences == list(range(4 * 5 + 1))


async def test_a_sidecar_that_is_gone_is_told_while_it_is_and_when_it_stays_so(bench: Bench) -> None:
    tape = await bench.open_tape()
    await bench.generate(tape)
    async with bench.following("--patience", "2") as watch:
        await watch.until(lambda output: "call 0" in output)
        await bench.running.sidecar.stop(grace_seconds=0)
        said = await watch.end(1)
    assert said.startswith(f"tokentape-watch: no sidecar answers at {bench.running.sidecar.address}: is it running?")
    assert said.count("\n") == 1
    assert watch.output.count("the sidecar is away") == 1


@pytest.mark.parametrize(
    ("tape_id", "reader_token", "said"),
    [
        (None, "wrong", "the reader token in the file is not that of main."),
        (f"main.{'0' * 32}", "any", "has no tape main.00000000…: it was deleted, nobody used it"),
    ],
)
async def test_a_tape_that_cannot_be_read_is_one_line(
    bench: Bench, tape_id: str | None, reader_token: str, said: str
) -> None:
    tape = await bench.open_tape()
    bench.add(tape_id or tape.tape_id, reader_token)
    async with bench.following() as watch:
        errors = await watch.end(1)
    assert said in errors
    assert errors.startswith("tokentape-watch: ")
    assert errors.count("\n") == 1
    assert reader_token not in errors.replace("reader token", "")
    assert (tape_id or tape.tape_id) not in errors


async def test_what_the_command_cannot_use_is_one_line(bench: Bench, tmp_path: Path) -> None:
    async with bench.following() as watch:
        assert "cannot read" in await watch.end(2)
    async with bench.watch("--replay", str(tmp_path / "none.jsonl")) as watch:
        assert await watch.end(2) == f"tokentape-watch: cannot read {tmp_path}/none.jsonl: No such file or directory\n"
    await bench.open_tape()
    async with bench.following("--sidecar-token-file", str(tmp_path / "none")) as watch:
        assert "--sidecar-token-file" in await watch.end(2)
    async with bench.following("--from", "5") as watch:
        assert "--from: main." in await watch.end(1)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_ends_it(slow_bench: Bench, number: signal.Signals, status: int) -> None:
    tape = await slow_bench.open_tape()
    making = asyncio.create_task(slow_bench.generate(tape))
    async with slow_bench.following() as watch:
        await watch.until(lambda output: "call 0" in output)
        watch.process.send_signal(number)
        assert await watch.end(status) == ""
    await slow_bench.running.client.seal(tape)
    await making


async def test_a_reader_that_has_seen_enough(bench: Bench, tmp_path: Path) -> None:
    tape = await bench.open_tape()
    for _ in range(200):
        await bench.generate(tape)
    await bench.running.client.seal(tape)
    shell = f"{WATCH} --reader-tokens {bench.readers} --json | head -1; exit ${{PIPESTATUS[0]}}"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", shell, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), SECONDS)
    assert output.startswith(b'{"call_started"')
    assert errors == b""
    # All of it may have fitted into the pipe.
    assert process.returncode in {0, 128 + signal.SIGPIPE}


async def test_a_tape_of_a_file_is_replayed(bench: Bench, tmp_path: Path, model_directory: Path) -> None:
    tape = await bench.open_tape()
    await bench.generate(tape)
    await bench.running.client.seal(tape)
    file = tmp_path / "tapes.jsonl"
    stored = await download(bench.running.client.channel, ExecutorTape(tape.tape_id, tape.reader_token))
    append_tape(file, stored)
    async with bench.watch("--replay", str(file)) as watch:
        await watch.end(0)
    assert "toy: its tokenizer is not here, so ids are shown" in watch.output
    assert "  sampled | 104 105 ⟦weights 2⟧33 " in watch.output
    async with bench.watch("--replay", str(file), "--tokenizer", str(model_directory), "--ids", "beside") as watch:
        await watch.end(0)
    assert "⟨104⟩" in watch.output
    async with bench.watch("--replay", str(file), "--json") as watch:
        await watch.end(0)
    entries = [ParseDict(json.loads(line), tape_pb2.TapeEntry()) for line in watch.output.splitlines()]
    assert tuple(entries) == stored.entries
    async with bench.watch("--replay", str(file), "--tape", "1") as watch:
        assert "has 1 tapes, counted from 0" in await watch.end(2)
    async with bench.watch("--replay", str(file), "--tokenizer", str(tmp_path)) as watch:
        assert "--tokenizer: cannot use" in await watch.end(2)


async def test_on_a_terminal_blocks_are_printed_and_the_rest_is_cleared_away(slow_bench: Bench) -> None:
    tape = await slow_bench.open_tape()
    making = asyncio.create_task(slow_bench.generate(tape))
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.pop("NO_COLOR", None)
    command = [WATCH, "--reader-tokens", str(slow_bench.readers)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=inside, stdout=inside, stderr=inside, env=environment
    )
    os.close(inside)
    written = bytearray()
    loop = asyncio.get_running_loop()
    loop.add_reader(terminal, lambda: _read_into(written, terminal, loop))
    try:
        # What is sampled now, and how the tape stands.
        await eventually(lambda: b"1 running" in written and b"\x1b[?25l" in written, SECONDS)
        await eventually(lambda: "2 tokens sampled" in written.decode(errors="replace"), SECONDS)
        await slow_bench.running.client.seal(tape)
        assert await asyncio.wait_for(process.wait(), SECONDS) == 0
        await eventually(lambda: b"\x1b[?25h" in written)
    finally:
        loop.remove_reader(terminal)
        os.close(terminal)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    await making
    text = written.decode()
    assert "sealed" in text
    assert "abort" in text
    # The last it does: the cursor is shown, and the live part erased.
    assert text.rindex("\x1b[?25h") > text.rindex("sampled with probability")
    assert text.rstrip().endswith("\x1b[2K")


def _read_into(written: bytearray, terminal: int, loop: asyncio.AbstractEventLoop) -> None:
    try:
        written.extend(os.read(terminal, 65536))
    except OSError:
        loop.remove_reader(terminal)  # the process has ended


@contextlib.asynccontextmanager
async def breaking_proxy(address: str) -> AsyncGenerator[tuple[str, set[asyncio.StreamWriter]]]:
    """Yield an address that leads to `address`, and its open connections, which the test may close."""
    host, _, port = address.rpartition(":")
    connections: set[asyncio.StreamWriter] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        connections.add(writer)
        try:
            await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))
        finally:
            connections.discard(writer)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", connections
        for connection in list(connections):
            connection.close()
        await asyncio.sleep(0)
