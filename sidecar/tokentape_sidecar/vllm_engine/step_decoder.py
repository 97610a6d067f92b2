"""Decoding the core's messages without calling Python for each array in them.

vLLM's decoder makes three numpy arrays of a request's log-probabilities at every step, which costs more than all else
that the direct path does. This one leaves them the bytes that they are (`msgspec.Raw`). Where a request of the direct
path sampled one token, it reads the two values from these, and the output has them as a plain tuple. All else, and all
of others' requests, is decoded by vLLM's own decoder, to its own types.

What is used of vLLM: `AsyncMPClient.decoder`, a `MsgpackDecoder` for `EngineCoreOutputs`, whose `decode(frames)` its
reader calls, with `ext_hook`, `dec_hook` and `aux_buffers`; `EngineCoreOutput.new_logprobs`, a `LogprobsLists`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, msgpack
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW, MsgpackDecoder

# vLLM's, in their order, but for the one field.
_Output = msgspec.defstruct("_Output", [("new_logprobs", Raw, None)], bases=(EngineCoreOutput,))
_Outputs = msgspec.defstruct(
    "_Outputs",
    [("outputs", list[_Output], msgspec.field(default_factory=list[Any]))],
    bases=(EngineCoreOutputs,),
)

# A `LogprobsLists` of one row and one column: of its four fields the first two, each an array's dtype, shape and data.
_IDS_BEFORE = {
    dtype: b"\x94\x93\xa3" + dtype.encode() + b"\x92\x01\x01" + ext + bytes([CUSTOM_TYPE_RAW_VIEW])
    for dtype, ext in {"<i8": b"\xd7", "<i4": b"\xd6"}.items()
}
_LOGPROBS_BEFORE = b"\x93\xa3<f4\x92\x01\x01\xd6" + bytes([CUSTOM_TYPE_RAW_VIEW])
_LAYOUTS = [
    (before, struct.Struct(f"<{len(before)}s{'q' if dtype == '<i8' else 'i'}{len(_LOGPROBS_BEFORE)}sf"))
    for dtype, before in _IDS_BEFORE.items()
]


def sampled_token(logprobs: bytes | Raw) -> tuple[int, float] | None:
    """Return the id and log-probability that an encoded `LogprobsLists` has; `None` unless it has just these."""
    for ids_before, layout in _LAYOUTS:
        if len(logprobs) > layout.size:
            before, token_id, between, logprob = layout.unpack_from(logprobs)
            if before == ids_before and between == _LOGPROBS_BEFORE:
                return token_id, logprob
    return None


class StepDecoder:
    """Stands in for the decoding of an engine's `decoder`, until `close`."""

    def __init__(self, decoder: MsgpackDecoder, states: Mapping[str, object], own: type) -> None:
        """`states` has vLLM's request states by id; those of type `own` can take a step's one token as a tuple."""
        self._decoder = decoder
        self._states = states
        self._own = own
        hooks: Any = {"ext_hook": decoder.ext_hook, "dec_hook": decoder.dec_hook}
        self._outputs: msgpack.Decoder[Any] = msgpack.Decoder(_Outputs, **hooks)
        self._lists: msgpack.Decoder[Any] = msgpack.Decoder(LogprobsLists | None, **hooks)
        # The reader has the object already, and looks the method up for each message.
        vars(decoder)["decode"] = self._decode

    def close(self) -> None:
        """Let vLLM decode by itself again."""
        if vars(self._decoder).get("decode") == self._decode:
            del vars(self._decoder)["decode"]

    def _decode(self, frames: Sequence[Any]) -> EngineCoreOutputs:
        # Where the hooks look for the data of large arrays.
        self._decoder.aux_buffers = frames
        try:
            outputs = self._outputs.decode(frames[0])
            for output in outputs.outputs:
                if output.new_logprobs is not None:
                    output.new_logprobs = self._logprobs_of(output)
            return outputs
        finally:
            self._decoder.aux_buffers = ()

    def _logprobs_of(self, output: EngineCoreOutput) -> object:
        encoded: Any = output.new_logprobs
        if len(output.new_token_ids) == 1 and type(self._states.get(output.request_id)) is self._own:
            token = sampled_token(encoded)
            if token is not None:
                return token
        return self._lists.decode(encoded)
