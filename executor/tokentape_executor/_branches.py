"""The tree of a tape's calls, and how its branches become samples. The rules are in `assembler.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokentape_executor.trajectory import Beginning, FinishReason, Sample, VersionSpan


@dataclass(slots=True)
class Choice:
    """One completion: columns of equal length, and the versions of the weights as runs."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    version_runs: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """(first token, version), ascending; a run ends where the next begins."""
    finish_reason: FinishReason | None = None

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], weight_version: str) -> None:
        """Take tokens that one version of the weights sampled."""
        if not self.version_runs or self.version_runs[-1][1] != weight_version:
            self.version_runs.append((len(self.token_ids), weight_version))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)


@dataclass(slots=True)
class Call:
    """One call: the ids of its prompt after its parent's, and its choices."""

    call_id: str
    index: int
    parent: tuple[Call, int] | None
    """The call and the choice that the prompt continues."""
    kept: int
    """How many of that choice's sampled tokens the prompt has."""
    prompt_token_ids: list[int]
    """The ids that follow the parent's."""
    prompt_token_count: int
    """Tokens in the whole prompt."""
    choices: list[Choice]

    def prompt(self) -> list[int]:
        """Return the whole prompt."""
        pieces = [self.prompt_token_ids]
        call = self
        while call.parent is not None:
            parent, choice = call.parent
            pieces += [parent.choices[choice].token_ids[: call.kept], parent.prompt_token_ids]
            call = parent
        return [token_id for piece in reversed(pieces) for token_id in piece]


@dataclass(slots=True)
class _Branch:
    """One choice of one call, as a place in the tree."""

    call: Call
    choice: Choice
    continuations: list[_Branch] = field(default_factory=list["_Branch"])
    """The branches that continue all of this choice and lead to a sampled token, in the order of their calls."""
    latest_call_index: int = 0
    """The latest call that the branch leads to, its own included."""

    @property
    def leads_somewhere(self) -> bool:
        return bool(self.choice.token_ids or self.continuations)

    @property
    def main_continuation(self) -> _Branch | None:
        """The continuation that stays in this branch's sample; the others begin samples of their own."""
        return max(self.continuations, key=_claim, default=None)


def _claim(branch: _Branch) -> tuple[bool, bool, int]:
    """Rank the branches that continue one choice: continued itself, then complete, then leading to the latest call."""
    reason = branch.choice.finish_reason
    return bool(branch.continuations), reason is not None and reason.complete, branch.latest_call_index


def build_samples(calls: Sequence[Call]) -> list[Sample]:
    """Return the samples of the tape whose calls these are, all ended, in the order in which they were made."""
    branches = {
        (call.index, choice): _Branch(call, call.choices[choice]) for call in calls for choice in _choices(call)
    }
    # Later calls continue earlier ones, so that going backwards every branch is linked before its parent is asked.
    for branch in reversed(branches.values()):
        branch.latest_call_index = max([branch.call.index, *(each.latest_call_index for each in branch.continuations)])
        if branch.call.parent is not None and branch.leads_somewhere:
            parent, choice = branch.call.parent
            if branch.call.kept == len(parent.choices[choice].token_ids):
                branches[parent.index, choice].continuations.insert(0, branch)
    extending = {id(branch.main_continuation) for branch in branches.values()}
    return [_follow(branch) for branch in branches.values() if branch.leads_somewhere and id(branch) not in extending]


def _choices(call: Call) -> range:
    return range(len(call.choices))


def _follow(first: _Branch) -> Sample:
    """Return the sample that begins with `first` and goes along main continuations to their end."""
    tokens = first.call.prompt()
    logprobs = [0.0] * len(tokens)
    action_ranges: list[tuple[int, int]] = []
    version_spans: list[VersionSpan] = []
    call_ids: list[str] = []
    branch = first
    while True:
        start = len(tokens)
        tokens += branch.choice.token_ids
        logprobs += branch.choice.logprobs
        call_ids.append(branch.call.call_id)
        if len(tokens) > start:
            action_ranges.append((start, len(tokens)))
            version_spans += _spans(branch.choice, start)
        following = branch.main_continuation
        if following is None:
            break
        branch = following
        tokens += branch.call.prompt_token_ids
        logprobs += [0.0] * len(branch.call.prompt_token_ids)
    assert branch.choice.finish_reason is not None, "the assembler lets no open choice through"
    return Sample(
        tokens=tokens,
        action_ranges=action_ranges,
        logprobs=logprobs,
        version_spans=version_spans,
        call_ids=call_ids,
        finish_reason=branch.choice.finish_reason,
        last_call_index=branch.call.index,
        beginning=Beginning.PROMPT if first.call.parent is None else Beginning.FORK,
    )


def _spans(choice: Choice, start: int) -> list[VersionSpan]:
    """Return the choice's runs of versions as spans of a sample in which the choice begins at `start`."""
    ends = [first for first, _ in choice.version_runs[1:]] + [len(choice.token_ids)]
    return [
        VersionSpan(start + first, start + end, version)
        for (first, version), end in zip(choice.version_runs, ends, strict=True)
    ]
