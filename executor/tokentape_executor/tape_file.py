"""Tapes in files: JSON lines, one tape a line, with the tape's entries as the contract's own JSON.

`docs/tape-file.md` describes the format. Writing and reading give back equal entries, chunking included. A line never
holds a tape's id or reader token: who reads the file can neither append to the tape nor read on.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc.aio
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from tokentape.v1 import generation_pb2, generation_pb2_grpc, tape_pb2, tape_pb2_grpc
from tokentape_executor.assembler import Assembler
from tokentape_executor.errors import ExecutorError, from_rpc_error
from tokentape_executor.tape_client import OpenedTape
from tokentape_executor.trajectory import Trajectory

FILE_VERSION = 1
"""The version of a line's own fields."""
TAPE_SCHEMA_VERSION = 1
"""The version of entries that this module knows, as in `GetTapeResponse.schema_version`."""

_FIELDS = frozenset({"tokentape_file", "schema_version", "tape_id_sha256", "created", "model", "entries"})
_RPC_TIMEOUT_SECONDS = 30.0
_MessageT = TypeVar("_MessageT", bound=Message)


class TapeFileError(ExecutorError):
    """A file is not one of tapes, or of a newer version; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class StoredTape:
    """A tape apart from its sidecar."""

    tape_id_sha256: str
    """Hex SHA-256 of the tape's id, as `ListTapes` gives it."""
    created: datetime.datetime
    """When it was stored, in UTC."""
    model: generation_pb2.GetModelResponse
    """What the tape's sidecar served when it was stored, without the sidecar's name."""
    entries: tuple[tape_pb2.TapeEntry, ...]
    """From the tape's beginning, as they came."""

    @classmethod
    def of(
        cls, tape_id: str, model: generation_pb2.GetModelResponse, entries: Sequence[tape_pb2.TapeEntry]
    ) -> StoredTape:
        """Return the tape of these entries, stored now."""
        served = generation_pb2.GetModelResponse()
        served.CopyFrom(model)
        served.ClearField("sidecar_name")
        digest = hashlib.sha256(tape_id.encode()).hexdigest()
        return cls(digest, datetime.datetime.now(datetime.UTC), served, tuple(entries))

    def trajectory(self) -> Trajectory:
        """Assemble the tape. Raises `TapeInconsistent`, also where the tape was not sealed when it was stored."""
        assembler = Assembler()
        for entry in self.entries:
            assembler.feed(entry)
        return assembler.trajectory()


async def download(channel: grpc.aio.Channel, tape: OpenedTape) -> StoredTape:
    """Return a tape as its sidecar has it now, by `GetTape`. Raises `RolloutError` by the table in `errors.py`."""
    stub = tape_pb2_grpc.TapeServiceStub(channel)
    entries: list[tape_pb2.TapeEntry] = []
    request = tape_pb2.GetTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token)
    try:
        model = await generation_pb2_grpc.GenerationServiceStub(channel).GetModel(
            generation_pb2.GetModelRequest(), timeout=_RPC_TIMEOUT_SECONDS
        )
        while True:
            page = await stub.GetTape(request, timeout=_RPC_TIMEOUT_SECONDS)
            entries += page.entries
            request.from_sequence = page.next_sequence
            if page.next_sequence >= page.end_sequence:
                return StoredTape.of(tape.tape_id, model, entries)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error("reading a tape", error) from error


def append_tape(path: Path, tape: StoredTape) -> None:
    """Add a tape to the end of a file, which is made if it is not there."""
    line = {
        "tokentape_file": FILE_VERSION,
        "schema_version": TAPE_SCHEMA_VERSION,
        "tape_id_sha256": tape.tape_id_sha256,
        "created": tape.created.isoformat(),
        "model": _to_json(tape.model),
        "entries": [_to_json(entry) for entry in tape.entries],
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")


def read_tapes(path: Path) -> Iterator[StoredTape]:
    """Yield the file's tapes in order, blank lines passed over. Raises `TapeFileError` at the first that is wrong."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _read_line(line, f"{path}:{number}")
    except OSError as error:
        raise TapeFileError(f"cannot read {path}: {error.strerror}") from None


def _read_line(line: bytes, place: str) -> StoredTape:
    try:
        parsed: object = json.loads(line)
    except ValueError as error:
        raise TapeFileError(f"{place}: not JSON: {error}") from None
    if not isinstance(parsed, dict) or "tokentape_file" not in parsed:
        raise TapeFileError(f"{place}: not a tape: there is no field tokentape_file")
    fields = cast("dict[str, Any]", parsed)
    _check_version(place, fields, "tokentape_file", FILE_VERSION)
    _check_version(place, fields, "schema_version", TAPE_SCHEMA_VERSION)
    if wrong := sorted(_FIELDS ^ fields.keys()):
        what = "missing" if wrong[0] in _FIELDS else "not known"
        raise TapeFileError(f"{place}: {wrong[0]}: the field is {what}")
    entries = cast("list[object]", _typed(place, fields, "entries", list))
    return StoredTape(
        tape_id_sha256=_typed(place, fields, "tape_id_sha256", str),
        created=_time(place, fields),
        model=_from_json(fields["model"], generation_pb2.GetModelResponse(), f"{place}: model"),
        entries=tuple(
            _from_json(entry, tape_pb2.TapeEntry(), f"{place}: entries[{index}]") for index, entry in enumerate(entries)
        ),
    )


def _check_version(place: str, fields: dict[str, Any], name: str, known: int) -> None:
    version = fields.get(name)
    if type(version) is not int or version < 1:
        raise TapeFileError(f"{place}: {name}: must be a version's number, not {version!r}")
    if version > known:
        raise TapeFileError(
            f"{place}: {name}: version {version} is newer than {known}, the latest that this tokentape reads"
        )


_T = TypeVar("_T")


def _typed(place: str, fields: dict[str, Any], name: str, kind: type[_T]) -> _T:
    value = fields[name]
    if not isinstance(value, kind):
        raise TapeFileError(f"{place}: {name}: must be a {kind.__name__}, not a {type(value).__name__}")
    return value


def _time(place: str, fields: dict[str, Any]) -> datetime.datetime:
    text = _typed(place, fields, "created", str)
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise TapeFileError(f"{place}: created: must be an ISO 8601 time with its zone, not {text!r}")
    return time


def _to_json(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)


def _from_json(value: object, message: _MessageT, place: str) -> _MessageT:
    if not isinstance(value, dict):
        raise TapeFileError(f"{place}: must be an object, not {value!r:.40}")
    try:
        return ParseDict(cast("dict[str, Any]", value), message)
    except ParseError as error:
        raise TapeFileError(f"{place}: {error}") from None
