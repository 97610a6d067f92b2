"""How the branches of a tape's tree become samples. The rules are in `assembler.py`."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from tokentape_executor._drops import Place
from tokentape_executor._tree import Call, Choice
from tokentape_executor.receipt import SplitCause
from tokentape_executor.trajectory import Action, ParentLink, Sample, VersionSpan


@dataclass(slots=True)
class _Branch:
    """One choice of one call, as a place in the tree."""

    call: Call
    index: int
    """Which of the call's choices."""
    continuations: list[_Branch] = field(default_factory=list["_Branch"])
    """The branches that continue all of this choice and lead to a sampled token, in the order of their calls."""
    latest_call_index: int = 0
    """The latest call that the branch leads to, its own included."""

    @property
    def choice(self) -> Choice:
        return self.call.choices[self.index]

    @property
    def place(self) -> Place:
        return self.call.index, self.index

    @property
    def leads_somewhere(self) -> bool:
        return bool(self.choice.token_ids or self.continuations)

    @property
    def main_continuation(self) -> _Branch | None:
        """The continuation that stays in this branch's sample, of equals the first; the others begin their own."""
        return max(self.continuations, key=_claim, default=None)

    def chain(self) -> Iterator[_Branch]:
        """Yield this branch and its main continuations, to the end of its sample."""
        branch: _Branch | None = self
        while branch is not None:
            yield branch
            branch = branch.main_continuation


def _claim(branch: _Branch) -> tuple[bool, bool, int]:
    """Rank the branches that continue one choice: continued itself, then complete, then leading to the latest call."""
    return bool(branch.continuations), branch.choice.complete, branch.latest_call_index


def build_samples(calls: Sequence[Call], dropped: Container[Place]) -> list[Sample]:
    """Return the samples of the tape whose calls these are, all ended, without the choices in `dropped`."""
    every = [_Branch(call, index) for call in calls for index in range(len(call.choices))]
    branches = {branch.place: branch for branch in every if branch.place not in dropped}
    # Later calls continue earlier ones, so that going backwards every branch is linked before its parent is asked.
    for branch in reversed(branches.values()):
        branch.latest_call_index = max([branch.call.index, *(each.latest_call_index for each in branch.continuations)])
        if branch.call.parent is not None and branch.leads_somewhere:
            parent, choice = branch.call.parent
            if branch.call.kept == len(parent.choices[choice].token_ids):
                branches[parent.index, choice].continuations.insert(0, branch)
    extending = {id(branch.main_continuation) for branch in branches.values()}
    firsts = [branch for branch in branches.values() if branch.leads_somewhere and id(branch) not in extending]
    owners = {branch.place: sample for sample, first in enumerate(firsts) for branch in first.chain()}
    return [_sample(first, _link(first.call, owners)) for first in firsts]


def _link(call: Call, owners: dict[Place, int]) -> ParentLink | None:
    """Return where a sample that begins with `call` forks off; `owners` has each place's sample."""
    if call.parent is None:
        return None
    parent, choice = call.parent
    return ParentLink(owners[parent.index, choice], parent.prompt_token_count + call.kept)


def _sample(first: _Branch, link: ParentLink | None) -> Sample:
    """Return the sample that begins with `first`."""
    tokens: list[int] = []
    logprobs: list[float] = []
    actions: list[Action] = []
    version_spans: list[VersionSpan] = []
    chain = list(first.chain())
    for branch in chain:
        call, choice = branch.call, branch.choice
        tokens += call.prompt_token_ids if tokens else call.prompt()
        start = len(tokens)
        logprobs += [0.0] * (start - len(logprobs))
        tokens += choice.token_ids
        logprobs += choice.logprobs
        assert choice.finish_reason is not None, "the assembler lets no open choice through"
        if len(tokens) > start:
            actions.append(
                Action(start, len(tokens), call.index, branch.index, choice.finish_reason, call.sampling),
            )
            version_spans += _spans(choice, start)
    last = chain[-1].choice.finish_reason
    assert last is not None
    return Sample(
        tokens=tokens,
        actions=actions,
        logprobs=logprobs,
        version_spans=version_spans,
        call_indices=[branch.call.index for branch in chain],
        finish_reason=last,
        split_cause=first.call.split_cause if link is None else SplitCause.FORK,
        lora_name=first.call.lora_name,
        parent=link,
    )


def _spans(choice: Choice, start: int) -> list[VersionSpan]:
    """Return the choice's runs of versions as spans of a sample in which the choice begins at `start`."""
    ends = [run.start for run in choice.weight_runs[1:]] + [len(choice.token_ids)]
    return [
        VersionSpan(start + run.start, start + end, run.weight_version, run.boundary_uncertain, run.stale_cache)
        for run, end in zip(choice.weight_runs, ends, strict=True)
    ]
