"""What the oracle found. Pure data; differences are of natural log-probabilities, in nats."""

from __future__ import annotations

from dataclasses import dataclass

from tokentape_executor.errors import ExecutorError


class OracleError(ExecutorError):
    """Samples do not verify, or cannot be verified."""


class SpanRefused(OracleError):
    """Tokens that no model can vouch for, or not this one."""


class ToleranceExceeded(OracleError):
    """Recorded log-probabilities are not the model's."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Differences of log-probabilities, in nats, that pass.

    The defaults are for bfloat16 at temperature 1: 8 bits of mantissa make logits near 20 exact to 0.06, and kernels
    differ in the order of their sums. At temperature T both are 1/T as large in processed mode.
    """

    largest: float = 0.6
    """At any one token."""
    mean: float = 0.06
    """Over the compared tokens of any one sample."""


DEFAULT_TOLERANCE = Tolerance()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The tokens `[start, end)` of a sample, which were not compared."""

    sample: int
    start: int
    end: int
    reason: str

    def __str__(self) -> str:
        """Name the tokens and the reason."""
        return f"sample {self.sample}, positions {self.start} to {self.end - 1}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SampleReport:
    """One sample, compared."""

    sample: int
    """Its index."""
    positions: list[int]
    """Its compared tokens, as positions in the sample, ascending."""
    differences: list[float]
    """|recorded - recomputed| log-probability at each, in nats."""
    refusals: list[Refusal]

    @property
    def mean(self) -> float:
        """The mean difference; 0.0 where nothing was compared."""
        return sum(self.differences) / len(self.differences) if self.differences else 0.0

    @property
    def largest(self) -> float:
        """The largest difference; 0.0 where nothing was compared."""
        return max(self.differences, default=0.0)

    @property
    def worst_position(self) -> int | None:
        """Where the largest difference is."""
        return max(zip(self.differences, self.positions, strict=True), default=(0.0, None))[1]

    def first_beyond(self, largest: float) -> int | None:
        """Return the first position whose difference is above `largest`."""
        pairs = zip(self.positions, self.differences, strict=True)
        return next((position for position, difference in pairs if not difference <= largest), None)


@dataclass(frozen=True, slots=True)
class OracleReport:
    """All samples, compared. Differences are in nats."""

    samples: list[SampleReport]

    @property
    def compared(self) -> int:
        """Tokens compared."""
        return sum(len(sample.positions) for sample in self.samples)

    @property
    def mean(self) -> float:
        """The mean difference over all compared tokens."""
        return sum(sum(sample.differences) for sample in self.samples) / self.compared if self.compared else 0.0

    @property
    def largest(self) -> float:
        """The largest difference."""
        return max((sample.largest for sample in self.samples), default=0.0)

    @property
    def refusals(self) -> list[Refusal]:
        """What was not compared."""
        return [refusal for sample in self.samples for refusal in sample.refusals]

    def check(self, tolerance: Tolerance) -> None:
        """Raise `ToleranceExceeded`, naming sample and first position, where a difference is beyond `tolerance`."""
        for sample in self.samples:
            position = sample.first_beyond(tolerance.largest)
            if position is not None:
                difference = sample.differences[sample.positions.index(position)]
                raise ToleranceExceeded(
                    f"sample {sample.sample}, position {position}: the recorded log-probability is {difference:.3f} "
                    f"from the model's, more than {tolerance.largest} (largest: {sample.largest:.3f} at position "
                    f"{sample.worst_position}; mean over {len(sample.positions)} tokens: {sample.mean:.3f})"
                )
            if not sample.mean <= tolerance.mean:
                raise ToleranceExceeded(
                    f"sample {sample.sample}: the recorded log-probabilities are {sample.mean:.3f} from the model's on "
                    f"average, more than {tolerance.mean} (largest: {sample.largest:.3f} at position "
                    f"{sample.worst_position})"
                )
