"""`tokentape-sidecar`: serve an engine over gRPC."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from tokentape.listen import ListenAddress, UnixAddress, parse_address
from tokentape.logs import configure_logging
from tokentape.process import UnusableReadyFile, clear_ready_file, write_ready_file
from tokentape.secret_file import UnusableSecretFile
from tokentape.tls import UnusableCertificate
from tokentape.tracing import TracingUnavailable, name_service, tracing
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.errors import TokentapeError
from tokentape_sidecar.grpc_server import check_files
from tokentape_sidecar.listener import AddressInUse
from tokentape_sidecar.metrics_server import metrics_served
from tokentape_sidecar.script import Script, ScriptError
from tokentape_sidecar.scripted_engine import ScriptedEngine
from tokentape_sidecar.server import Sidecar
from tokentape_sidecar.settings import Settings, parse_settings
from tokentape_sidecar.unix_socket import check_unserved

logger = logging.getLogger("tokentape.sidecar")

_SERVICE = "tokentape-sidecar"
_VLLM_LOGGING = Path(__file__).with_name("vllm_logging.json")

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def _make_engine(settings: Settings) -> Engine:
    if settings.engine == "scripted":
        assert settings.script is not None
        assert settings.tokenizer is not None
        return ScriptedEngine(Script.load(settings.script), settings.tokenizer)
    _prepare_vllm(settings)
    # Imported here: vLLM takes seconds to import, and a scripted sidecar needs none.
    from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415

    assert settings.model is not None
    engine = await VllmEngine.load(
        model=settings.model,
        served_model_name=settings.served_model_name,
        logprobs_mode=settings.logprobs_mode,
        loras=settings.loras,
        arguments=settings.vllm_arguments,
        otlp_traces_endpoint=settings.otlp_traces_endpoint,
    )
    engine.freeze_process()
    return engine


def _prepare_vllm(settings: Settings) -> None:
    """Set what vLLM, and the processes that it starts, take from the environment."""
    if settings.log_format == "json":
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(_VLLM_LOGGING))
    if settings.otlp_traces_endpoint is not None:
        name_service(_SERVICE, settings.name)


def _check_free(option: str, listen: ListenAddress | UnixAddress | None) -> None:
    """Raise `AddressInUse` now rather than after the engine has loaded, which takes its time."""
    if listen is None:
        return
    if isinstance(listen, UnixAddress):
        check_unserved(listen.path)
        return
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((listen.host, listen.port))
    except OSError as error:
        raise AddressInUse(f"{option}: cannot listen on {listen}: {error.strerror}") from None


async def _serve(settings: Settings) -> None:
    _check_free("--listen", settings.data.address)
    _check_free("--control", settings.control.address if settings.control else None)
    _check_free("--metrics-listen", settings.metrics_listen)
    for listener in (settings.data, settings.control):
        if listener is not None:
            # Now rather than after the engine has loaded.
            check_files(listener)
    if settings.ready_file is not None:
        clear_ready_file(settings.ready_file)
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
        # After the engine: where it makes traces itself, its tracer provider is the process's.
        with tracing(settings.otlp_traces_endpoint, _SERVICE, settings.name):
            await _serve_on(engine, settings, stop)
    finally:
        await engine.close()


async def _serve_on(engine: Engine, settings: Settings, stop: asyncio.Event) -> None:
    """Serve `engine` until `stop` is set."""
    sidecar = await Sidecar.start(
        engine,
        data=settings.data,
        control=settings.control,
        weights_root=settings.weights_root,
        limits=settings.limits,
        name=settings.name,
        stall_limit_seconds=settings.stall_limit_seconds,
    )
    try:
        # To the very end: how a sidecar drains is worth seeing.
        with metrics_served(sidecar.measured, settings.metrics_listen) as metrics_address:
            places = {"controls": sidecar.control_address, "metrics": metrics_address}
            others = "".join(f", {what} on {address}" for what, address in places.items() if address is not None)
            logger.info("serving %s on %s as %r%s", engine.model.name, sidecar.address, sidecar.name, others)
            if settings.ready_file is not None:
                write_ready_file(
                    settings.ready_file,
                    parse_address(sidecar.address),
                    metrics=metrics_address,
                    control=sidecar.control_address,
                )
            await stop.wait()
            _let_signals_end_the_process()
            logger.info("stopping; %d calls are running", sidecar.running_call_count)
            await sidecar.stop(grace_seconds=settings.grace_seconds)
    finally:
        await sidecar.stop(grace_seconds=0)


def _let_signals_end_the_process() -> None:
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.remove_signal_handler(number)
        # The system's own handling, not Python's: a second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)


def main(arguments: list[str] | None = None) -> int:
    """Run a sidecar until it is told to stop. Returns the exit code: 0, or 1 where it could not serve."""
    settings = parse_settings(sys.argv[1:] if arguments is None else arguments)
    configure_logging(settings.log_level, settings.log_format)
    try:
        asyncio.run(_serve(settings))
    except (
        TokentapeError,
        ScriptError,
        AddressInUse,
        UnusableSecretFile,
        UnusableCertificate,
        UnusableReadyFile,
        TracingUnavailable,
    ) as error:
        print(f"tokentape-sidecar: {error}", file=sys.stderr)  # noqa: T201 - the answer to a command
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
