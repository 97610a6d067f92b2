"""`tokentape-sidecar`: serve an engine over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import re
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokentape.process import ListenAddress, add_server_options, configure_logging, write_ready_file
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.errors import TokentapeError
from tokentape_sidecar.script import Script, ScriptError
from tokentape_sidecar.scripted_engine import ScriptedEngine
from tokentape_sidecar.server import AddressInUse, Sidecar
from tokentape_sidecar.stall import DEFAULT_STALL_LIMIT_SECONDS

logger = logging.getLogger("tokentape.sidecar")

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_EPILOG = """\
examples:
  # vLLM on this machine; what follows -- goes to vLLM as it stands
  tokentape-sidecar --model ./SmolLM2-135M-Instruct -- --dtype bfloat16 --max-model-len 2048

  # no model: replay a script (sidecar/README.md has the format)
  tokentape-sidecar --engine scripted --script toy.json --tokenizer ./SmolLM2-135M-Instruct

  # then, from another terminal
  grpcurl -plaintext 127.0.0.1:50051 list
  grpcurl -plaintext -d '{"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 8}}' \\
    127.0.0.1:50051 tokentape.v1.GenerationService/Generate
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a sidecar process was told; see `--help`."""

    engine: Literal["vllm", "scripted"]
    listen: ListenAddress
    name: str
    ready_file: Path | None
    log_level: str
    grace_seconds: float
    stall_limit_seconds: float
    model: str | None
    served_model_name: str | None
    logprobs_mode: Literal["processed", "raw"]
    loras: Mapping[str, Path]
    script: Path | None
    tokenizer: Path | None
    vllm_arguments: tuple[str, ...]


def _sidecar_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 to 64 letters, digits, '-' or '_'")
    return text


def _lora(text: str) -> tuple[str, Path]:
    name, equals, directory = text.partition("=")
    if not (name and equals and directory):
        raise argparse.ArgumentTypeError(f"{text!r} must be of the form NAME=DIR")
    return name, Path(directory)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, at least 0")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokentape-sidecar",
        description="Serve an inference engine over gRPC: token ids in, token ids and log-probabilities out, every "
        "rollout recorded on a tape.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --model MODEL [options] [-- VLLM OPTIONS]\n       "
        "%(prog)s --engine scripted --script FILE --tokenizer DIR [options]",
    )
    add_server_options(parser, default_listen="127.0.0.1:50051")
    parser.add_argument(
        "--name",
        type=_sidecar_name,
        default="main",
        help="this sidecar's name: the part of its tapes' ids before the dot (default: main)",
    )
    parser.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="how long running calls may go on after SIGTERM or SIGINT (default: 10); a second signal exits at once",
    )
    parser.add_argument(
        "--stall-limit",
        type=_seconds,
        default=DEFAULT_STALL_LIMIT_SECONDS,
        dest="stall_limit_seconds",
        metavar="S",
        help="when calls run and the engine has emitted nothing for this long, they fail with UNAVAILABLE and no more "
        f"are taken until it answers again; 0: never (default: {DEFAULT_STALL_LIMIT_SECONDS:g})",
    )
    parser.add_argument("--engine", choices=["vllm", "scripted"], default="vllm", help="default: vllm")
    vllm = parser.add_argument_group("vLLM")
    vllm.add_argument("--model", help="a model directory, or a name that vLLM can load")
    vllm.add_argument("--served-model-name", metavar="NAME", help="what clients call it (default: as --model)")
    vllm.add_argument(
        "--logprobs-mode",
        choices=["processed", "raw"],
        default="processed",
        help="log-probabilities of the distribution that is sampled from, or of the model's raw softmax "
        "(default: processed)",
    )
    vllm.add_argument(
        "--lora",
        type=_lora,
        action="append",
        default=[],
        dest="loras",
        metavar="NAME=DIR",
        help="serve the LoRA adapter in DIR (PEFT's format) as well, under this name; may be repeated",
    )
    scripted = parser.add_argument_group("scripted engine")
    scripted.add_argument("--script", type=Path, metavar="FILE", help="what to replay")
    scripted.add_argument("--tokenizer", type=Path, metavar="DIR", help="a directory with a tokenizer.json")
    return parser


def parse_settings(arguments: list[str]) -> Settings:
    """Read the command line; exits with a usage message where it is wrong."""
    own, dashes, vllm_arguments = (
        (arguments, None, []) if "--" not in arguments else _split_at(arguments, arguments.index("--"))
    )
    parser = _parser()
    options = parser.parse_args(own)
    if options.engine == "vllm" and not options.model:
        parser.error("--model is needed (or --engine scripted, to replay a script)")
    if options.engine == "scripted" and not (options.script and options.tokenizer):
        parser.error("--engine scripted needs --script and --tokenizer")
    if options.engine == "scripted" and dashes:
        parser.error("options after -- are vLLM's; --engine scripted takes none")
    if options.engine == "scripted" and options.loras:
        parser.error("--lora is vLLM's; --engine scripted has the script's model.lora_names")
    if len(dict(options.loras)) < len(options.loras):
        parser.error("--lora: two adapters have the same name")
    options.loras = dict(options.loras)
    return Settings(**vars(options), vllm_arguments=tuple(vllm_arguments))


def _split_at(arguments: list[str], index: int) -> tuple[list[str], str, list[str]]:
    return arguments[:index], arguments[index], arguments[index + 1 :]


async def _make_engine(settings: Settings) -> Engine:
    if settings.engine == "scripted":
        assert settings.script is not None
        assert settings.tokenizer is not None
        return ScriptedEngine(Script.load(settings.script), settings.tokenizer)
    # Imported here: vLLM takes seconds to import, and a scripted sidecar needs none.
    from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415

    assert settings.model is not None
    return await VllmEngine.load(
        model=settings.model,
        served_model_name=settings.served_model_name,
        logprobs_mode=settings.logprobs_mode,
        loras=settings.loras,
        arguments=settings.vllm_arguments,
    )


def _check_free(listen: ListenAddress) -> None:
    """Raise `AddressInUse` now rather than after the engine has loaded, which takes its time."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            raise AddressInUse(f"--listen: cannot listen on {listen}: {error.strerror}") from None


async def _serve(settings: Settings) -> None:
    _check_free(settings.listen)
    for number in _STOP_SIGNALS:
        # While the engine loads it blocks the loop: a signal then ends the process by an exception, which lets the
        # engine take its own processes with it.
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    engine = await _make_engine(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        sidecar = await Sidecar.start(
            engine,
            listen=settings.listen,
            name=settings.name,
            stall_limit_seconds=settings.stall_limit_seconds,
        )
        logger.info("serving %s on %s as %r", engine.model.name, sidecar.address, sidecar.name)
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, ListenAddress.parse(sidecar.address))
        await stop.wait()
        for number in _STOP_SIGNALS:
            # The system's own handling again: a second signal ends the process at once.
            loop.remove_signal_handler(number)
        logger.info("stopping; %d calls are running", sidecar.running_call_count)
        await sidecar.stop(grace_seconds=settings.grace_seconds)
    finally:
        await engine.close()


def main(arguments: list[str] | None = None) -> int:
    """Run a sidecar until it is told to stop. Returns the exit code: 0, or 1 where it could not serve."""
    settings = parse_settings(sys.argv[1:] if arguments is None else arguments)
    configure_logging(settings.log_level)
    try:
        asyncio.run(_serve(settings))
    except (TokentapeError, ScriptError, AddressInUse) as error:
        print(f"tokentape-sidecar: {error}", file=sys.stderr)  # noqa: T201 - the answer to a command
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
