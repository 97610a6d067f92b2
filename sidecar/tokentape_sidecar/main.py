"""`tokentape-sidecar`: serve an engine over gRPC."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys

from tokentape.listen import ListenAddress, UnixAddress, parse_address
from tokentape.process import configure_logging, write_ready_file
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.errors import TokentapeError
from tokentape_sidecar.grpc_server import AddressInUse
from tokentape_sidecar.script import Script, ScriptError
from tokentape_sidecar.scripted_engine import ScriptedEngine
from tokentape_sidecar.server import Sidecar
from tokentape_sidecar.settings import Settings, parse_settings

logger = logging.getLogger("tokentape.sidecar")

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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


def _check_free(listen: ListenAddress | UnixAddress) -> None:
    """Raise `AddressInUse` now rather than after the engine has loaded, which takes its time."""
    if isinstance(listen, UnixAddress):
        return
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            raise AddressInUse(f"--listen: cannot listen on {listen}: {error.strerror}") from None


async def _serve(settings: Settings) -> None:
    _check_free(settings.data.address)
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
            data=settings.data,
            control=settings.control,
            weights_root=settings.weights_root,
            limits=settings.limits,
            name=settings.name,
            stall_limit_seconds=settings.stall_limit_seconds,
        )
        logger.info("serving %s on %s as %r", engine.model.name, sidecar.address, sidecar.name)
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, parse_address(sidecar.address))
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
