"""A call as it was asked for, and what becomes of it before the engine sees it: checked, and bounded by its tape."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tokentape_sidecar.engine import Model, Sampling
from tokentape_sidecar.errors import ContextOverflow, InvalidArgument, LimitReached, NotFound
from tokentape_sidecar.limits import MAX_FINGERPRINT_CHARACTERS, MAX_NAME_CHARACTERS, Limits
from tokentape_sidecar.origin import Origin
from tokentape_sidecar.record import Parent
from tokentape_sidecar.tape import Tape
from tokentape_sidecar.validation import check_length, check_lora, check_sampling, check_token_ids


@dataclass(frozen=True, slots=True)
class CallReference:
    """A place in an earlier call of the tape: `offset` sampled tokens of its `choice` (`None`: all)."""

    call_id: str
    choice: int = 0
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call as it was asked for; the fields mean what `tokentape.v1.GenerateRequest` says."""

    prompt_token_ids: Sequence[int]
    parent: CallReference | None = None
    sampling: Sampling = field(default_factory=Sampling)
    origin: Origin = field(default_factory=Origin)
    priority: int = 0
    lora_name: str = ""
    cache_salt: str = ""
    trace_headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the engine's spans belong below, as W3C's headers."""


def check(request: CallRequest, tape: Tape | None, model: Model, limits: Limits) -> tuple[Parent | None, Sampling]:
    """Return where the prompt begins and the parameters in force, with `n` and `max_tokens` present.

    Raises `InvalidArgument`, `NotFound`, `ContextOverflow` or `LimitReached`.
    """
    _check_names(request)
    check_lora(request.lora_name, model)
    parent = _resolve_parent(request, tape)
    # First how long the prompt is: to go through a hundred million ids would stop every other call.
    sampling = _sampling_for(request, parent, tape, model, limits)
    check_token_ids("prompt_token_ids", request.prompt_token_ids, model.vocabulary_size)
    return parent, sampling


def _sampling_for(
    request: CallRequest, parent: Parent | None, tape: Tape | None, model: Model, limits: Limits
) -> Sampling:
    asked = request.sampling
    if tape is not None:
        asked = asked.overlaid(tape.policy.sampling)
    check_sampling(asked, model, limits=limits)
    sampling = model.default_sampling.overlaid(asked)
    n, seed = sampling.n or 1, sampling.seed
    room = _room(request, parent, tape, model.max_context_tokens)
    if tape is not None:
        room = min(room, _share_of_tape(tape, n))
        if tape.policy.seed is not None:
            seed = _mixed_seed(tape.policy.seed, tape.tape_id, len(tape.calls))
    max_tokens = min(room, sampling.max_tokens or room)
    # Where the room is less than what must be sampled, the call ends at its length; an engine would refuse it.
    min_tokens = None if sampling.min_tokens is None else min(sampling.min_tokens, max_tokens)
    return replace(sampling, n=n, seed=seed, max_tokens=max_tokens, min_tokens=min_tokens)


def _check_names(request: CallRequest) -> None:
    """Check what the engine or the tape keeps as it is given."""
    check_length("anchor", request.origin.anchor, MAX_NAME_CHARACTERS)
    check_length("context_fingerprint", request.origin.context_fingerprint, MAX_FINGERPRINT_CHARACTERS)
    check_length("cache_salt", request.cache_salt, MAX_NAME_CHARACTERS)
    check_length("lora_name", request.lora_name, MAX_NAME_CHARACTERS)


def _resolve_parent(request: CallRequest, tape: Tape | None) -> Parent | None:
    reference = request.parent
    if reference is None:
        return None
    if tape is None:
        raise InvalidArgument("parent", "needs a tape_id: only calls on a tape can be continued")
    record = tape.call(reference.call_id)
    if record is None:
        raise NotFound(f"parent.call_id: no call {reference.call_id[:100]!r} on this tape")
    if record.lora_name != request.lora_name:
        # Its tokens would be those of one sample, and no single policy has sampled them.
        raise InvalidArgument(
            "lora_name", f"the parent was sampled with {record.lora_name!r}, not {request.lora_name!r}"
        )
    if reference.choice >= len(record.choices):
        raise InvalidArgument(
            "parent.choice", f"the call has {len(record.choices)} choices, not a choice {reference.choice}"
        )
    sampled = len(record.choices[reference.choice].token_ids)
    offset = sampled if reference.offset is None else reference.offset
    if offset > sampled:
        raise InvalidArgument("parent.offset", f"the choice has {sampled} sampled tokens, not {offset}")
    return Parent(record, reference.choice, offset)


def _room(request: CallRequest, parent: Parent | None, tape: Tape | None, max_context_tokens: int) -> int:
    prompt = len(request.prompt_token_ids) + (parent.record.prompt_token_count + parent.offset if parent else 0)
    if prompt == 0:
        raise InvalidArgument("prompt_token_ids", "must not be empty")
    if tape is not None and tape.limits.max_context_tokens is not None:
        max_context_tokens = min(max_context_tokens, tape.limits.max_context_tokens)
    if prompt >= max_context_tokens:
        raise ContextOverflow(prompt, max_context_tokens)
    return max_context_tokens - prompt


def _share_of_tape(tape: Tape, n: int) -> int:
    left = tape.tokens_left()
    if left is None:
        return 2**32 - 1
    if left < n:
        raise LimitReached(
            f"tape_id: the tape has {left} of its {tape.limits.max_sampled_tokens} sampled tokens left "
            "(max_sampled_tokens)"
        )
    return left // n


def _mixed_seed(policy_seed: int, tape_id: str, call_index: int) -> int:
    digest = hashlib.sha256(f"{policy_seed}/{tape_id}/{call_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
