"""Sidecars that ask who is there: in this process, on real sockets, with tokens and certificates in files."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from tokentape.listen import ListenAddress, UnixAddress
from tokentape.tls import ServerTls
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.limits import DEFAULT_LIMITS, Limits
from tokentape_sidecar.listener import Listener
from tokentape_sidecar.server import Sidecar

LOOPBACK = ListenAddress("127.0.0.1", 0)


@asynccontextmanager
async def guarded_sidecar(
    engine: Engine,
    *,
    token_file: Path | None = None,
    tls: ServerTls | None = None,
    control_token_file: Path | None = None,
    address: ListenAddress | UnixAddress = LOOPBACK,
    limits: Limits = DEFAULT_LIMITS,
) -> AsyncGenerator[Sidecar]:
    """Serve `engine`, and with a `control_token_file` its controls, on free ports; abort what runs on leaving."""
    control = None
    if control_token_file is not None:
        control = Listener(LOOPBACK, control_token_file, tls, "--control-token-file")
    sidecar = await Sidecar.start(
        engine, data=Listener(address, token_file, tls), control=control, name="main", limits=limits
    )
    try:
        yield sidecar
    finally:
        await sidecar.stop(grace_seconds=0)
        await engine.close()
