"""What becomes of a request's fields beside those that do something: the base of all requests, and two markers.

Types are strict (a string is no number), an explicit null means absent, and unknown fields are ignored: each is named
in the log once. Ranges are the sidecar's to judge. `Refused` and `Ignored` stand in a field's annotation.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict

from tokentape_bridge.errors import ApiError

_logger = logging.getLogger(__name__)
_MAX_NAMES_LOGGED = 200
_names_logged: set[str] = set()


class Model(BaseModel):
    """What all of a request's objects have in common."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Refused:
    """Marks a field that asks for what this bridge cannot do."""

    instead: str
    """What to do, as the end of a sentence for the client."""
    unless: tuple[object, ...] = ()
    """Values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class _IgnoredMark:
    pass


Ignored = Annotated[Any, _IgnoredMark()]
"""The type of a field that clients are known to send and that means nothing here."""


def reject_refused(request: Model, path: str = "") -> None:
    """Raise `ApiError` naming the first field of `request` that asks for what is not supported.

    `path` is where `request` stands in the body, with a dot at its end.
    """
    for name, mark in _refused(type(request)):
        value = getattr(request, name)
        if value is not None and value not in mark.unless:
            problem = f"{path}{name}: is not supported; {mark.instead}"
            raise ApiError(problem, param=f"{path}{name}", code="unsupported_parameter")


def log_ignored_fields(request: Model, path: str = "") -> None:
    """Log the fields of `request` that mean nothing here, each name once in the life of the process.

    `path` is as in `reject_refused`.
    """
    known = (name for name in _ignored(type(request)) if getattr(request, name) is not None)
    _log_names(f"{path}{name}" for name in (*known, *(request.model_extra or ())))


@functools.cache
def _refused(model: type[Model]) -> list[tuple[str, Refused]]:
    fields = model.model_fields.items()
    return [(name, mark) for name, field in fields for mark in field.metadata if isinstance(mark, Refused)]


@functools.cache
def _ignored(model: type[Model]) -> list[str]:
    return [name for name, field in model.model_fields.items() if _IgnoredMark() in field.metadata]


def _log_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in _names_logged and len(_names_logged) < _MAX_NAMES_LOGGED:
            _names_logged.add(name)
            _logger.info("ignoring the request field %.80a, which means nothing here", name)
