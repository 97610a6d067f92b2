"""Console scripts. Each needs an extra of the distribution; where that is missing, the script says which."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import NoReturn, cast


def _run(module: str, extra: str) -> NoReturn:
    try:
        main = cast("Callable[[], int]", importlib.import_module(module).main)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] == module.partition(".")[0]:
            raise
        sys.exit(
            f"{sys.argv[0]}: the module {missing.name!r} is missing; install it with: pip install 'tokentape[{extra}]'"
        )
    sys.exit(main())


def sidecar() -> NoReturn:
    """Run `tokentape-sidecar`."""
    _run("tokentape_sidecar.main", "sidecar")


def bridge() -> NoReturn:
    """Run `tokentape-bridge`."""
    _run("tokentape_bridge.main", "bridge")


def rollout() -> NoReturn:
    """Run `tokentape-rollout`."""
    _run("tokentape_executor.cli.main", "executor")


def watch() -> NoReturn:
    """Run `tokentape-watch`."""
    _run("tokentape_executor.watch.main", "executor")
