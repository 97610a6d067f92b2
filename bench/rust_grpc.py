"""The gRPC of vLLM's Rust front end: as much of its contract as a reader of token ids and log-probabilities needs.

Its wheel has no `.proto` and its server no reflection; the numbers of the fields are those of
`rust/proto/inference.proto` in vLLM's repository. Fields that are not named here are skipped, as protobuf skips what it
does not know.
"""

from __future__ import annotations

import uuid
from functools import cache
from typing import Any

from bench.grpc_clients import GrpcClient
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "float": _Field.TYPE_FLOAT,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
}
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "TokenIds": {"ids": (1, "repeated uint32")},
    "StoppingCriteria": {"max_new_tokens": (1, "uint32"), "ignore_eos": (6, "bool")},
    "ResponseOptions": {
        "output_text": (4, "optional bool"),
        "output_token_ids": (5, "bool"),
        "output_logprobs": (6, "bool"),
    },
    "GenerateRequest": {
        "request_id": (1, "string"),
        "model": (2, "string"),
        "token_ids": (4, "TokenIds"),
        "temperature": (5, "optional float"),
        "stopping": (8, "StoppingCriteria"),
        "response": (9, "ResponseOptions"),
    },
    "SequenceOutput": {"token_ids": (4, "repeated uint32"), "logprobs": (5, "repeated float")},
    "GenerateResponse": {"outputs": (2, "SequenceOutput")},
}


@cache
def messages() -> dict[str, Any]:
    """Return the classes of the messages by name."""
    file = descriptor_pb2.FileDescriptorProto(name="bench/vllm_inference.proto", package="vllm", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add_field(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"vllm.{name}")) for name in _MESSAGES}


def _add_field(message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str) -> None:
    *labels, type_name = kind.split()
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if type_name in _SCALARS:
        field.type = _SCALARS[type_name]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".vllm.{type_name}"
    if labels == ["repeated"]:
        field.label = _Field.LABEL_REPEATED
    elif labels == ["optional"]:
        # A field that knows whether it was set is the only one of a oneof.
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


class RustGrpcClient(GrpcClient):
    """`vllm.Inference/GenerateStream`."""

    name = "GenerateStream"

    def method(self, channel: Any) -> Any:
        return channel.unary_stream(
            "/vllm.Inference/GenerateStream",
            request_serializer=messages()["GenerateRequest"].SerializeToString,
            response_deserializer=messages()["GenerateResponse"].FromString,
        )

    def ask(self, prompt: list[int]) -> Any:
        of = messages()
        return of["GenerateRequest"](
            request_id=uuid.uuid4().hex,
            model=self.load.model,
            token_ids=of["TokenIds"](ids=prompt),
            temperature=1.0,
            stopping=of["StoppingCriteria"](max_new_tokens=self.load.new_tokens, ignore_eos=True),
            response=of["ResponseOptions"](output_text=False, output_token_ids=True, output_logprobs=True),
        )

    def count(self, response: Any) -> int:
        return len(response.outputs.logprobs)
