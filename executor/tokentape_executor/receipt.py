"""A rollout's receipt: what became of every sampled token. Pure data.

Conservation: `sampled == kept + dropped`. A receipt that breaks it cannot be made.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokentape_executor.errors import TapeInconsistent


class DropReason(enum.StrEnum):
    """Why sampled tokens are in no sample: nobody ever saw them, or somebody saw others in their place."""

    SUPERSEDED = "superseded"
    """The call was made again, with the same prompt and parameters, and only the later one counted."""
    ABANDONED = "abandoned"
    """The call was aborted and nothing continues it: its client left, or the tape was sealed while it ran."""
    FAILED = "failed"
    """The call failed and nothing continues it."""


class SplitCause(enum.StrEnum):
    """Why a sample begins where it does: `tokentape.v1.SplitCause` by its names, and `FORK`."""

    UNSPECIFIED = "unspecified"
    """No parent, and nobody said why; also a cause that this version does not know."""
    NEW_CONVERSATION = "new_conversation"
    HISTORY_EDITED = "history_edited"
    ANSWER_INSERTED = "answer_inserted"
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_ARGUMENTS_CHANGED = "template_arguments_changed"
    SPECIAL_TOKEN_TEXT = "special_token_text"  # noqa: S105 - the name of a cause
    TEMPLATE_ERROR = "template_error"
    TEMPLATE_REWRITES_HISTORY = "template_rewrites_history"
    TEMPLATE_STRIPS_REASONING = "template_strips_reasoning"
    TERMINATOR_DIFFERS = "terminator_differs"
    MESSAGE_LOST = "message_lost"
    PARENT_INCOMPLETE = "parent_incomplete"
    CONTINUATION_OFF = "continuation_off"
    LORA_CHANGED = "lora_changed"
    FORK = "fork"
    """Its first call continues a place that another sample goes on from, or holds more after."""


BEGINNINGS = frozenset({SplitCause.UNSPECIFIED, SplitCause.NEW_CONVERSATION})
"""The causes that cut nothing: no conversation of the rollout is known to have gone on here."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The account of one tape. Counts are of tokens where nothing else is said."""

    sampled: int
    """Sampled on the tape."""
    kept: int
    """In an action range of a sample; each in exactly one."""
    dropped: Mapping[DropReason, int]
    """In no sample. Every reason is there, with 0 where it was not met."""
    samples: int
    """Samples of the trajectory."""
    splits: Mapping[SplitCause, int]
    """Samples by what they begin for; only the causes that were met. They add up to `samples`."""
    calls: int
    """Calls on the tape, those without a sampled token included."""
    weight_versions: tuple[str, ...]
    """Versions of the weights that sampled, in order of calls, each once; "" is that of weights never named."""
    ledger_sha256: str
    """Hex SHA-256 of the tape's ledger (`docs/tape-file.md`): two readers of one tape get the same."""

    def __post_init__(self) -> None:
        """Raise `TapeInconsistent` where a token or a sample is not accounted for."""
        if self.sampled != self.kept + self.dropped_total:
            raise TapeInconsistent(
                f"{self.sampled} tokens were sampled, but {self.kept} kept and {self.dropped_total} dropped"
            )
        if self.samples != sum(self.splits.values()):
            raise TapeInconsistent(f"{self.samples} samples begin for {sum(self.splits.values())} causes")

    @property
    def dropped_total(self) -> int:
        """Tokens that are in no sample."""
        return sum(self.dropped.values())

    @property
    def split_total(self) -> int:
        """Samples that begin although a conversation of the rollout had gone on before them."""
        return sum(count for cause, count in self.splits.items() if cause not in BEGINNINGS)

    def as_dict(self) -> dict[str, Any]:
        """Return the receipt as JSON takes it."""
        return {
            "sampled": self.sampled,
            "kept": self.kept,
            "dropped": {reason.value: count for reason, count in self.dropped.items()},
            "samples": self.samples,
            "splits": {cause.value: count for cause, count in self.splits.items()},
            "calls": self.calls,
            "weight_versions": list(self.weight_versions),
            "ledger_sha256": self.ledger_sha256,
        }
