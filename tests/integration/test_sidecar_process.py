"""The `tokentape-sidecar` command: how it starts, how it refuses to, and how it stops."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from support.refusals import refused
from support.scripted import (
    TOY_TOKENIZER,
    call,
    run_sidecar,
    script,
    scripted_arguments,
    sidecar_process,
    tokens,
)
from support.sidecar_client import SidecarClient
from support.waiting import eventually
from tokentape.v1 import generation_pb2, types_pb2
from tokentape_sidecar.main import main

FOREVER = 60_000
ANSWER = call(tokens(10, 11, finish="stop"))
ENDLESS = call(tokens(10), tokens(11, delay_ms=FOREVER))
SHORT = call(tokens(10), tokens(11, delay_ms=700, finish="stop"))


async def begin(client: SidecarClient) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """A call whose first token has come."""
    events = aiter(client.generation.Generate(generation_pb2.GenerateRequest(prompt_token_ids=[1])))
    assert (await anext(events)).WhichOneof("event") == "started"
    assert list((await anext(events)).delta.token_ids) == [10]
    return events


# Starting


async def test_a_sidecar_serves_when_its_ready_file_says_so(tmp_path: Path) -> None:
    arguments = scripted_arguments(script(ANSWER, name="toy"), tmp_path)
    async with (
        sidecar_process(*arguments, "--name", "node-1", directory=tmp_path) as process,
        SidecarClient(process.address) as client,
    ):
        model = await client.generation.GetModel(generation_pb2.GetModelRequest())
        assert (model.name, model.sidecar_name) == ("toy", "node-1")
        assert (await client.generate()).token_ids() == [10, 11]
        assert "serving toy on" in process.output


async def test_two_sidecars_do_not_share_a_port(tmp_path: Path) -> None:
    arguments = scripted_arguments(script(ANSWER), tmp_path)
    async with (
        sidecar_process(*arguments, directory=tmp_path) as process,
        SidecarClient(process.address) as client,
    ):
        second = await asyncio.to_thread(run_sidecar, *arguments, "--listen", process.address)
        assert second.returncode == 1
        assert second.stdout == ""
        expected = f"tokentape-sidecar: --listen: cannot listen on {process.address}: Address already in use\n"
        assert second.stderr == expected
        assert (await client.generate()).token_ids() == [10, 11]


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a sidecar that could not serve says: one line, and exit code 1."""
    assert main([*arguments, "--listen", "127.0.0.1:0"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_missing_tokenizer_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = scripted_arguments(script(), tmp_path, tokenizer=tmp_path / "none")
    message = f"tokentape-sidecar: --tokenizer: there is no tokenizer.json in {tmp_path / 'none'}\n"
    assert refusal(arguments, capsys) == message


def test_a_ready_file_that_cannot_be_written_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*scripted_arguments(script(), tmp_path), "--ready-file", str(tmp_path)]
    expected = f"tokentape-sidecar: --ready-file {tmp_path} cannot be written: Is a directory\n"
    assert refusal(arguments, capsys) == expected


def test_a_broken_tokenizer_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    arguments = scripted_arguments(script(), tmp_path, tokenizer=tmp_path)
    assert f"--tokenizer: {tmp_path / 'tokenizer.json'} is not a tokenizer: " in refusal(arguments, capsys)


def test_a_missing_script_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none.json"
    arguments = ["--engine", "scripted", "--script", str(file), "--tokenizer", str(TOY_TOKENIZER)]
    expected = f"tokentape-sidecar: cannot read the script {file}: No such file or directory\n"
    assert refusal(arguments, capsys) == expected


def test_a_bad_script_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = scripted_arguments({"calls": [{"steps": [{"token_ids": ["x"]}]}]}, tmp_path)
    assert "script.json is not a script: calls.0.steps.0.token_ids.0: " in refusal(arguments, capsys)


def test_an_address_of_another_machine_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("none of them is read before the address is tried")
    guarded = [arg for option in ("--tls-certificate", "--tls-key", "--token-file") for arg in (option, str(secret))]
    arguments = [*scripted_arguments(script(), tmp_path), "--listen", "192.0.2.1:50051", *guarded]
    assert main(arguments) == 1
    assert "--listen: cannot listen on 192.0.2.1:50051: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is needed"),
        (["--engine", "scripted"], "--engine scripted needs --script and --tokenizer"),
        (["--engine", "scripted", "--script", "a", "--tokenizer", "b", "--", "--dtype", "x"], "options after -- are"),
        (["--model", "m", "--listen", "50051"], "'50051' is not HOST:PORT"),
        (["--model", "m", "--listen", "localhost:99999"], "is not HOST:PORT"),
        (["--model", "m", "--name", "a.b"], "'a.b' must be 1 to 64 letters"),
        (["--model", "m", "--logprobs-mode", "both"], "--logprobs-mode"),
        (["--model", "m", "--lora", "math"], "--lora: 'math' must be of the form NAME=DIR"),
        (["--model", "m", "--lora", "=dir"], "--lora: '=dir' must be of the form NAME=DIR"),
        (["--model", "m", "--lora", "a=x", "--lora", "a=y"], "--lora: two adapters have the same name"),
        (["--engine", "scripted", "--script", "a", "--tokenizer", "b", "--lora", "a=x"], "--lora is vLLM's"),
        (["--model", "m", "--grace-seconds", "-1"], "--grace-seconds"),
        (["--model", "m", "--grace-seconds", "nan"], "--grace-seconds"),
    ],
)
def test_a_wrong_command_line_is_told_by_its_option(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_help_shows_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("--model", "--engine scripted", "--script", "--ready-file", "--listen", "grpcurl", "examples:"):
        assert word in text


# Stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stopped_sidecar_lets_its_call_finish_and_refuses_others(
    number: signal.Signals, tmp_path: Path
) -> None:
    arguments = scripted_arguments(script(SHORT, ANSWER), tmp_path)
    async with (
        sidecar_process(*arguments, "--grace-seconds", "20", directory=tmp_path) as process,
        SidecarClient(process.address) as client,
    ):
        events = await begin(client)
        process.signal(number)
        await eventually(lambda: "stopping; 1 calls are running" in process.output)
        with refused(grpc.StatusCode.UNAVAILABLE, "the sidecar is shutting down"):
            await client.generate()
        rest = [event async for event in events]
        assert [i for event in rest for i in event.delta.token_ids] == [11]
        assert rest[-1].finished.finish_reason == types_pb2.FINISH_REASON_STOP
        assert await process.wait(10) == 0
        assert "1 of the script's 2 calls were never made" in process.output
        assert "Traceback" not in process.output


async def test_what_outlives_the_grace_period_is_aborted_and_keeps_its_tokens(tmp_path: Path) -> None:
    arguments = scripted_arguments(script(ENDLESS), tmp_path)
    async with (
        sidecar_process(*arguments, "--grace-seconds", "0.2", directory=tmp_path) as process,
        SidecarClient(process.address) as client,
    ):
        tape = await client.open_tape()
        request = generation_pb2.GenerateRequest(prompt_token_ids=[1], tape_id=tape.tape_id)
        events = aiter(client.generation.Generate(request))
        watcher = asyncio.create_task(client.watch(tape))
        await anext(events)
        await anext(events)
        process.signal(signal.SIGTERM)
        rest = [event async for event in events]
        assert rest[-1].finished == types_pb2.Completion(finish_reason=types_pb2.FINISH_REASON_ABORT, token_count=1)
        assert await process.wait(10) == 0
        # Nobody sealed the tape: its watcher must not take it for complete.
        with pytest.raises(grpc.aio.AioRpcError):
            await watcher
        assert "Traceback" not in process.output


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    arguments = scripted_arguments(script(ENDLESS), tmp_path)
    async with (
        sidecar_process(*arguments, "--grace-seconds", "60", directory=tmp_path) as process,
        SidecarClient(process.address) as client,
    ):
        await begin(client)
        process.signal(signal.SIGTERM)
        await eventually(lambda: "stopping" in process.output)
        started = time.monotonic()
        process.signal(signal.SIGTERM)
        assert await process.wait(5) == -signal.SIGTERM
        assert time.monotonic() - started < 2


async def test_an_idle_sidecar_stops_quickly_with_exit_code_0(tmp_path: Path) -> None:
    async with sidecar_process(*scripted_arguments(script(), tmp_path), directory=tmp_path) as process:
        started = time.monotonic()
        process.signal(signal.SIGTERM)
        assert await process.wait(5) == 0
        assert time.monotonic() - started < 3


async def test_a_client_gets_through_again_soon_after_a_restart_on_the_same_port_D12(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    arguments = [*scripted_arguments(script(ANSWER), tmp_path), "--listen", address]
    async with SidecarClient(address) as client:
        async with sidecar_process(*arguments, directory=tmp_path):
            assert (await client.generate()).token_ids() == [10, 11]
        with refused(grpc.StatusCode.UNAVAILABLE, ""):
            await client.generate()
        async with sidecar_process(*arguments, directory=tmp_path):
            async with asyncio.timeout(5):
                generated = await generate_once_up(client)
            assert generated == [10, 11]


async def generate_once_up(client: SidecarClient) -> list[int]:
    while True:
        try:
            return (await client.generate()).token_ids()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(0.05)


async def test_the_format_of_the_readme_runs(tmp_path: Path, checkout: Path) -> None:
    """The example script of sidecar/README.md, as it stands there."""
    readme = (checkout / "sidecar" / "README.md").read_text()
    example = readme.partition("```json\n")[2].partition("```")[0]
    arguments = scripted_arguments(json.loads(example), tmp_path)
    async with (
        sidecar_process(*arguments, directory=tmp_path) as process,
        SidecarClient(process.address) as client,
    ):
        generated = await client.generate([1, 2, 3])
        assert generated.token_ids()[:2] == [42, 7]
        assert generated.finish_reason() == types_pb2.FINISH_REASON_STOP
