"""Requests made up from the contract's own descriptors: of the right shape, with values that nobody would send.

Some strings are names that the test fills in (`filled`), so that a request gets past the first checks now and then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

TAPE, TOKEN, CALL = "$tape", "$token", "$call"
"""Stand for a tape's id, its reader token, and a call on it."""

_NAMES = {"tape_id": TAPE, "reader_token": TOKEN, "call_id": CALL}
_Bounds = tuple[int, int]
_INTEGERS: dict[int, _Bounds] = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
_MOST_LEVELS = 4


def messages(descriptor: Descriptor, level: int = 0) -> st.SearchStrategy[Message]:
    """Make messages of this kind: any field there or not, any value in it."""
    optional = {field.name: _values(field, level) for field in descriptor.fields if _can_be_set(field, level)}
    return st.fixed_dictionaries({}, optional=optional).map(lambda values: _built(descriptor, values))


def filled(message: Message, names: Mapping[str, str]) -> Message:
    """Put what `names` says in place of the names, everywhere in `message`; returns it."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING and isinstance(value, str):
            setattr(message, field.name, names.get(value, value))
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in [value] if isinstance(value, Message) else value:
                filled(each, names)
    return message


def edits() -> st.SearchStrategy[list[tuple[int, int, bytes]]]:
    """Make changes to bytes: at a place, so many bytes give way to others; places count round and round."""
    return st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 4), st.binary(max_size=4)), max_size=4)


def edited(content: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """Apply `edits` to bytes."""
    for place, taken, put in changes:
        at = place % (len(content) + 1)
        content = content[:at] + put + content[at + taken :]
    return content


def _can_be_set(field: FieldDescriptor, level: int) -> bool:
    return field.message_type is None or level < _MOST_LEVELS


def _values(field: FieldDescriptor, level: int) -> st.SearchStrategy[Any]:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
        return st.dictionaries(_value(key, level), _value(value, level), max_size=4)
    if field.is_repeated:
        return st.lists(_value(field, level), max_size=6)
    return _value(field, level)


def _value(field: FieldDescriptor, level: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, level + 1)
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values]) | st.integers(-5, 40)
    match field.type:
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_STRING:
            name = _NAMES.get(field.name)
            return st.just(name) | st.text(max_size=40) if name else st.text(max_size=40)
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return st.floats() | st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf])
        case _:
            low, high = _INTEGERS[field.type]
            return st.integers(0, 3) | st.sampled_from([low, high]) | st.integers(low, high)


def _built(descriptor: Descriptor, values: Mapping[str, Any]) -> Message:
    message = GetMessageClass(descriptor)()
    for name, value in values.items():
        field = descriptor.fields_by_name[name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, name).update(value)
        elif field.is_repeated:
            getattr(message, name).extend(value)
        elif field.message_type is not None:
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return message
