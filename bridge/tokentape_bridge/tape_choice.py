"""Which tape records a request: the one that its URL, its metadata, its user or its header names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tokentape_bridge.errors import ApiError
from tokentape_bridge.sampling_fields import Recorded

TAPE_ID = re.compile(r"(?P<sidecar>[A-Za-z0-9][A-Za-z0-9_-]{0,63})\.[0-9a-f]{32}")
"""A tape id: the name of the sidecar that holds the tape, and 128 random bits."""


_MAX_PAIRS = 16
_MAX_KEY_CHARACTERS = 64
_MAX_VALUE_CHARACTERS = 512
_LONG_KEYS = frozenset({"extra_body"})
"""NeMo Gym's model server leaves in what it has read from it."""


def requested_tape_id(request: Recorded, header: str | None, path: str | None) -> str:
    """Return the tape id that `request`, its header or its URL's path names; empty where none does.

    `user` names a tape only where it is of a tape id's form: for clients it is whatever they like. Raises `ApiError`
    where two places name different tapes, or one is named by nothing, and where the metadata is larger than OpenAI's.
    """
    _check_metadata(request.metadata or {})
    in_metadata: object = (request.metadata or {}).get("tape_id")
    if in_metadata is not None and not isinstance(in_metadata, str):
        raise ApiError("metadata.tape_id: must be a string", param="metadata.tape_id", code="invalid_value")
    user = request.user if request.user is not None and TAPE_ID.fullmatch(request.user) else None
    places = {"the URL's path": path, "metadata.tape_id": in_metadata, "user": user, "the header x-tape-id": header}
    named = [(place, tape_id) for place, tape_id in places.items() if tape_id is not None]
    for place, tape_id in named[1:]:
        if tape_id != named[0][1]:
            raise ApiError(f"{place}: is not the tape of {named[0][0]}", param="metadata.tape_id", code="invalid_value")
    if not named:
        return ""
    if not named[0][1]:
        # Taken for none, it would lose what was to be recorded.
        raise malformed_tape_id()
    return named[0][1]


def _check_metadata(metadata: Mapping[str, object]) -> None:
    """Raise `ApiError` where there is more of it than OpenAI takes."""
    if len(metadata) > _MAX_PAIRS:
        raise _too_large("metadata", f"must have at most {_MAX_PAIRS} pairs, has {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY_CHARACTERS:
            raise _too_large("metadata", f"a key must have at most {_MAX_KEY_CHARACTERS} characters, has {len(key)}")
        # Values that are no strings mean nothing here, and go no further.
        if isinstance(value, str) and len(value) > _MAX_VALUE_CHARACTERS and key not in _LONG_KEYS:
            problem = f"must have at most {_MAX_VALUE_CHARACTERS} characters, has {len(value)}"
            raise _too_large(f"metadata.{key}", problem)


def _too_large(field: str, problem: str) -> ApiError:
    return ApiError(f"{field}: {problem}", param=field, code="invalid_value")


def malformed_tape_id() -> ApiError:
    """Return the error of a tape id that is none."""
    return ApiError(
        "metadata.tape_id: is not of the form <sidecar name>.<32 hex digits>",
        param="metadata.tape_id",
        code="invalid_value",
    )
