"""Which completions go into no sample, and why. The rules are in `assembler.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tokentape_executor._tree import Call
from tokentape_executor.receipt import DropReason
from tokentape_executor.trajectory import FinishReason

Place = tuple[int, int]
"""A call's index and one of its choices."""


def dropped_choices(calls: Sequence[Call]) -> dict[Place, DropReason]:
    """Return what is dropped of a tape whose calls these are, all ended. Nothing that a call continues is among it."""
    continued = {place[:2] for call in calls if (place := call.parent_place) is not None}
    dropped: dict[Place, DropReason] = {}
    for siblings in _siblings(calls):
        remade = False
        for call in reversed(siblings):
            places = [(call.index, choice) for choice in range(len(call.choices))]
            reason = _fate(call, has_child=not continued.isdisjoint(places), remade=remade)
            if reason is not None:
                dropped |= dict.fromkeys(places, reason)
            else:
                dropped |= {place: reason for place, reason in _incomplete(call).items() if place not in continued}
                remade = True
    return dropped


def _fate(call: Call, *, has_child: bool, remade: bool) -> DropReason | None:
    """Return why the whole call is dropped, `None` where it is not. `remade`: a later sibling was kept."""
    if has_child:
        return None
    if remade:
        return DropReason.SUPERSEDED
    reasons = _incomplete(call).values()
    if DropReason.FAILED in reasons:
        return DropReason.FAILED
    return DropReason.ABANDONED if reasons else None


def _siblings(calls: Sequence[Call]) -> list[list[Call]]:
    """Group calls of one prompt, one adapter and equal parameters, each group in the order of the calls."""
    groups: defaultdict[object, list[Call]] = defaultdict(list)
    for call in calls:
        # Deterministic, because a map's order (logit_bias) is no difference.
        parameters = call.sampling.SerializeToString(deterministic=True)
        groups[call.parent_place, tuple(call.prompt_token_ids), call.lora_name, parameters].append(call)
    return list(groups.values())


def _incomplete(call: Call) -> dict[Place, DropReason]:
    """Return the choices that neither the model nor a limit ended, with what that makes of them."""
    return {
        (call.index, index): DropReason.FAILED if choice.finish_reason is FinishReason.FAILED else DropReason.ABANDONED
        for index, choice in enumerate(call.choices)
        if not choice.complete
    }
