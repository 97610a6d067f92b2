"""gRPC does not survive a fork: its threads are not in the child, and what they held stays held."""

from __future__ import annotations

import os


class UsedBeforeForkError(RuntimeError):
    """A process that was forked from one that uses gRPC cannot use it: it would hang or crash."""


class _User:
    """The first process that used gRPC; a child that was forked later inherits it."""

    pid: int | None = None


def use_grpc() -> None:
    """Note that this process uses gRPC. Raises `UsedBeforeForkError` where its parent did before it forked this one."""
    pid = os.getpid()
    if _User.pid is None:
        _User.pid = pid
    elif _User.pid != pid:
        raise UsedBeforeForkError(
            f"this process was forked from {_User.pid}, which had used gRPC; gRPC does not survive a fork. Start it by "
            'spawn instead: multiprocessing.get_context("spawn"), or subprocess'
        )
