"""Options from a file, and the lines of the log."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path

import pytest

from tokentape.listen import ListenAddress
from tokentape.logs import bind, configure_logging
from tokentape.process import UnusableReadyFile, clear_ready_file, write_ready_file
from tokentape_bridge.settings import parse_settings as parse_bridge
from tokentape_bridge.settings import read_arguments
from tokentape_executor.cli.arguments import RunOptions
from tokentape_executor.cli.arguments import parse as parse_rollout
from tokentape_sidecar.settings import parse_settings as parse_sidecar

# --config FILE


def file_of(directory: Path, text: str) -> str:
    file = directory / "options.toml"
    file.write_text(text)
    return str(file)


def test_a_sidecars_file_says_what_its_command_line_would(tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        """
        model = "m"
        listen = "127.0.0.1:0"
        control = true
        grace-seconds = 2.5
        max-tapes = 7
        lora = {math = "adapters/math", code = "adapters/code"}

        [vllm]
        dtype = "bfloat16"
        max-model-len = 2048
        enforce-eager = true
        enable-prefix-caching = false
        compilation-config = {level = 0}
        """,
    )
    command_line = (
        "--model m --listen 127.0.0.1:0 --control --grace-seconds 2.5 --max-tapes 7 --lora math=adapters/math "
        "--lora code=adapters/code -- --dtype bfloat16 --max-model-len 2048 --enforce-eager --no-enable-prefix-caching "
        "--compilation-config"
    )
    assert parse_sidecar(["--config", file]) == parse_sidecar([*command_line.split(), '{"level": 0}'])


def test_the_command_line_wins(tmp_path: Path) -> None:
    file = file_of(tmp_path, 'model = "m"\nname = "a"\nlora = ["x=1", "y=2"]\nvllm = ["--dtype", "float32"]')
    told = parse_sidecar(["--name", "b", f"--config={file}", "--lora", "z=3", "--", "--dtype", "bfloat16"])
    assert (told.model, told.name, dict(told.loras)) == ("m", "b", {"z": Path("3")})
    # The last one is the one that vLLM takes.
    assert told.vllm_arguments == ("--dtype", "float32", "--dtype", "bfloat16")


def test_a_bridges_file_is_read_once_for_all_workers(tmp_path: Path) -> None:
    file = file_of(tmp_path, 'sidecar = {a = "127.0.0.1:1"}\nno-continuation = true\nworkers = 2\nrequest-timeout = 5')
    arguments = read_arguments(["--config", file, "--workers", "3"])
    Path(file).unlink()
    told = parse_bridge(arguments)
    assert dict(told.sidecars) == {"a": "127.0.0.1:1"}
    assert (told.chat.continues, told.http.workers, told.http.request_timeout_seconds) == (False, 3, 5)


def test_a_rollouts_file_has_its_options_too(tmp_path: Path) -> None:
    file = file_of(tmp_path, 'output = "o.jsonl"\nmodel = "m"\nsamples = 4\ntemperature = 0.5\nvllm = {dtype = "auto"}')
    told = parse_rollout(["p.jsonl", "--config", file])
    assert isinstance(told, RunOptions)
    assert (told.output, told.samples, told.sampling.temperature) == (Path("o.jsonl"), 4, 0.5)
    assert told.vllm_options == ("--dtype", "auto")


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_sidecar, 'listn = "x"', "{file}: there is no option --listn for the key 'listn'"),
        (parse_sidecar, 'lis = "127.0.0.1:0"', "{file}: there is no option --lis for the key 'lis'"),
        (parse_sidecar, 'config = "x"', "{file}: there is no option --config for the key 'config'"),
        (parse_sidecar, 'listen = "50051"', "{file}: listen: argument --listen: '50051' is not HOST:PORT"),
        (parse_sidecar, 'log-level = "loud"', "{file}: log-level: argument --log-level: invalid choice: 'loud'"),
        (parse_sidecar, "model = true", "{file}: model: needs a value, not true or false"),
        (parse_sidecar, 'model = ["a", "b"]', "{file}: model: takes one value"),
        (parse_sidecar, "lora = [true]", "{file}: lora: must be text or a number, not true"),
        (parse_sidecar, "vllm = 3", "{file}: vllm: must be a list of words, or a table of options"),
        (parse_sidecar, "model = ", "--config: {file} is not TOML: "),
        (parse_bridge, "no-continuation = 1", "{file}: no-continuation: must be true or false"),
        (parse_bridge, 'vllm = ["--dtype"]', "{file}: there is no option --vllm for the key 'vllm'"),
        (parse_bridge, "workers = 0", "{file}: workers: argument --workers: '0' is not a whole number above 0"),
        (parse_rollout, 'prompts = "p"', "{file}: there is no option --prompts for the key 'prompts'"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_by_file_and_key(
    parse: Callable[[list[str]], object], text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of(tmp_path, text)
    with pytest.raises(SystemExit) as caught:
        parse(["--config", file])
    assert caught.value.code == 2
    assert message.format(file=file) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config"], "argument --config: expected one argument"),
        (["--config", "none.toml"], "--config: none.toml cannot be read: No such file or directory"),
        (["--max-message-bytes", "1048576"], "'1048576' is below 2097152, what clients may put together"),
        (["--max-message-bytes", "2147483648"], "'2147483648' is above 2147483647, gRPC's own limit"),
        (["--config", "a", "--config=b"], "--config: there may be one file"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_sidecar(arguments)
    assert message in capsys.readouterr().err


def test_a_traces_endpoint_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_sidecar(["--model", "m"]).otlp_traces_endpoint is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:4317")
    assert parse_sidecar(["--model", "m"]).otlp_traces_endpoint == "http://127.0.0.1:4317"
    told = parse_bridge(["--sidecar", "a=b:1", "--otlp-traces-endpoint", "https://traces:4317"])
    assert told.otlp_traces_endpoint == "https://traces:4317"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "127.0.0.1:4317")
    with pytest.raises(SystemExit):
        parse_sidecar(["--model", "m"])
    assert "--otlp-traces-endpoint: '127.0.0.1:4317' is not a URL" in capsys.readouterr().err


# The log


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What some code logs, line by line."""

    def run(log_format: str, code: Callable[[], None]) -> list[str]:
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        root = logging.getLogger()
        before = root.handlers[:], root.level
        root.handlers.clear()
        configure_logging("debug", "json" if log_format == "json" else "text")
        try:
            copy_context().run(code)
        finally:
            logging.captureWarnings(capture=False)
            root.handlers[:], level = before
            root.setLevel(level)
        return stream.getvalue().splitlines()

    return run


def complain() -> None:
    bind(request_id="r-1")
    bind(call_id="call-2")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("tokentape.test").exception("it says %d", 3, extra={"more": [1]})


def test_a_json_line_has_all_that_is_known(logged: Callable[..., list[str]]) -> None:
    (line,) = logged("json", complain)
    told = json.loads(line)
    assert told.pop("time").endswith("+00:00")
    assert told.pop("exception").endswith("ValueError: broken")
    assert told == {
        "level": "ERROR",
        "logger": "tokentape.test",
        "message": "it says 3",
        "more": [1],
        "request_id": "r-1",
        "call_id": "call-2",
    }


def test_a_line_of_text_has_the_ids_that_its_message_lacks(logged: Callable[..., list[str]]) -> None:
    def tell() -> None:
        bind(request_id="r-1", call_id="call-2")
        logging.getLogger("tokentape.test").info("call-2 is well")
        logging.getLogger("tokentape.test").debug("r-1 and call-2 are well")

    first, second = logged("text", tell)
    assert first.endswith("INFO    tokentape.test: call-2 is well [request_id=r-1]")
    assert second.endswith("DEBUG   tokentape.test: r-1 and call-2 are well")


def test_what_grpc_says_of_itself_is_not_debugging_of_ours(logged: Callable[..., list[str]]) -> None:
    assert logged("text", lambda: logging.getLogger("grpc._cython.cygrpc").debug("Loaded running loop")) == []


def test_a_ready_file_names_what_else_is_served(tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    write_ready_file(file, ListenAddress("127.0.0.1", 1), metrics=ListenAddress("127.0.0.1", 2), control=None)
    told = json.loads(file.read_text())
    assert (told["address"], told["metrics"]) == ("127.0.0.1:1", "127.0.0.1:2")
    assert "control" not in told


def test_a_ready_file_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "made" / "ready.json"
    clear_ready_file(file)
    assert file.parent.is_dir()
    write_ready_file(file, ListenAddress("127.0.0.1", 1))
    clear_ready_file(file)
    assert not file.exists()


def write_some_ready_file(file: Path) -> None:
    write_ready_file(file, ListenAddress("127.0.0.1", 1))


@pytest.mark.parametrize("use", [clear_ready_file, write_some_ready_file])
def test_a_ready_file_that_cannot_be_written_is_told(tmp_path: Path, use: Callable[[Path], None]) -> None:
    for file, reason in ((tmp_path, "Is a directory"), (Path("/dev/null/ready"), "File exists")):
        with pytest.raises(UnusableReadyFile, match=f"^--ready-file {file} cannot be written: {reason}$"):
            use(file)
    assert list(tmp_path.iterdir()) == []
