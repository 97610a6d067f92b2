"""The file that names sidecars while the bridge runs: `--sidecar-file`.

It holds one JSON object, name → gRPC address, and is to be replaced as a whole (written beside, then renamed). What
cannot be used (no file, no such object, a bad name) changes nothing: the table before it stands, and the log says why.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from tokentape.access import OPEN, Access
from tokentape.channel import check_access
from tokentape.file_signature import Signature, signature_of
from tokentape_bridge.settings import SIDECAR_NAME

_logger = logging.getLogger(__name__)


class SidecarTable:
    """Name of each sidecar → its address: those that are fixed, and those of a file as it is now."""

    def __init__(self, fixed: Mapping[str, str], file: Path | None, access: Access = OPEN) -> None:
        """Take those that are `fixed`, which `file` may not name again; `None`: no file.

        `access` is shown to all of them; an address for which it will not do cannot be used.
        """
        self._access = access
        self._fixed = fixed
        self._file = file
        self._seen: Signature | str | None = ""
        """What the file was when it was last looked at; None: not there. "" is like no file's."""
        self._named: Mapping[str, str] = {}

    def current(self) -> Mapping[str, str]:
        """Return the table of now. Costs one `stat` while the file is the same."""
        if self._file is not None and (found := signature_of(self._file)) != self._seen:
            self._seen = found
            self._read(self._file)
        return {**self._fixed, **self._named}

    def _read(self, file: Path) -> None:
        try:
            named = _parse(file.read_bytes(), self._fixed)
            for address in named.values():
                check_access(address, self._access)
            self._named = named
        except (OSError, ValueError) as error:
            _logger.error("--sidecar-file %s cannot be used, the sidecars stay as they are: %s", file, error)
        else:
            _logger.info("--sidecar-file %s names the sidecars %s", file, sorted(self._named))


def _parse(content: bytes, fixed: Mapping[str, str]) -> dict[str, str]:
    """Return the object in the file. Raises `ValueError` where it is not one of names and addresses."""
    parsed: object = json.loads(content)
    if not isinstance(parsed, dict):
        raise ValueError("it does not hold a JSON object")
    for name, address in cast("dict[str, object]", parsed).items():
        if not SIDECAR_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no name of a sidecar")
        if not isinstance(address, str) or not address:
            raise ValueError(f"{name}: {address!r:.80} is no address")
        if name in fixed:
            raise ValueError(f"--sidecar {name} is there already")
    return cast("dict[str, str]", parsed)
