"""The contract's `GenerateRequest` for a request, without its prompt."""

from __future__ import annotations

from tokentape.v1.generation_pb2 import GenerateRequest
from tokentape.v1.types_pb2 import SamplingParameters
from tokentape_bridge.sampling import fit
from tokentape_bridge.sampling_fields import SamplingFields


def call_for(request: SamplingFields, sampling: SamplingParameters, *, tape_id: str, lora_name: str) -> GenerateRequest:
    """Return the call that samples as `sampling` says, on the tape `tape_id` and with an adapter (empty: without).

    Raises `ApiError` for what the contract's types cannot hold.
    """
    call = GenerateRequest(sampling=sampling)
    fit("metadata.tape_id", setattr, call, "tape_id", tape_id)
    fit("model", setattr, call, "lora_name", lora_name)
    if request.cache_salt is not None:
        fit("cache_salt", setattr, call, "cache_salt", request.cache_salt)
    if request.priority is not None:
        fit("priority", setattr, call, "priority", request.priority)
    return call
