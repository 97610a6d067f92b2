"""The logs of what a keeper runs, which may run for weeks: none grows without bounds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

BRIDGE, GYM, KEEPER = "bridge.log", "nemo_gym.log", "node.log"
"""Their names."""

LONGEST_BYTES = 64 * 2**20
LOOK_SECONDS = 30.0


async def bound_logs(directory: Path) -> None:
    """Look after the logs in `directory` until cancelled: one that is too long is moved to `NAME.1`, and begins anew.

    Who writes them has them open to append, and goes on at the new beginning. What is written between copying and
    cutting is lost.
    """
    while True:
        for name in (BRIDGE, GYM, KEEPER):
            # It is not there yet, or the disk is full; logs stop nothing.
            with contextlib.suppress(OSError):
                await asyncio.to_thread(_bound, directory / name)
        await asyncio.sleep(LOOK_SECONDS)


def _bound(log: Path) -> None:
    if log.stat().st_size > LONGEST_BYTES:
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)
