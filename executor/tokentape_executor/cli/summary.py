"""What a file of results adds up to, and how that is shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from tokentape_executor.cli.row import COMPLETED, Json


@dataclass(slots=True)
class Totals:
    """Sums over rows."""

    statuses: Counter[str] = field(default_factory=Counter[str])
    causes: Counter[str] = field(default_factory=Counter[str])
    """Rollouts that did not complete, by `error_type`."""
    rewards: float = 0.0
    """Of those that completed."""
    truncated: int = 0
    calls: int = 0
    sampled: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    samples: int = 0
    splits: Counter[str] = field(default_factory=Counter[str])
    weight_versions: dict[str, None] = field(default_factory=dict[str, None])
    """In the order in which they were met."""

    def add(self, row: Json) -> None:
        """Take a row in."""
        self.statuses[row["status"]] += 1
        if row["status"] == COMPLETED:
            self.rewards += row["reward"]
        else:
            self.causes[row["error_type"]] += 1
        self.truncated += row["truncated"]
        receipt = row["receipt"]
        self.calls += receipt["calls"]
        self.sampled += receipt["sampled"]
        self.kept += receipt["kept"]
        self.dropped.update(receipt["dropped"])
        self.samples += receipt["samples"]
        self.splits.update(receipt["splits"])
        self.weight_versions |= dict.fromkeys(receipt["weight_versions"])

    @property
    def rollouts(self) -> int:
        """How many rows."""
        return self.statuses.total()

    @property
    def failed(self) -> int:
        """Rollouts that did not complete, placeholders among them."""
        return self.rollouts - self.statuses[COMPLETED]

    @property
    def mean_reward(self) -> float | None:
        """Of the rollouts that completed; `None` where none did."""
        completed = self.statuses[COMPLETED]
        return self.rewards / completed if completed else None

    @property
    def conserved(self) -> bool:
        """Whether every sampled token is accounted for: sampled == kept + dropped."""
        return self.sampled == self.kept + self.dropped.total()


@dataclass(frozen=True, slots=True)
class ThisRun:
    """What was done now, and not by an earlier run."""

    rollouts: int
    sampled: int
    """Tokens, those of attempts that failed and of interrupted rollouts included."""
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens sampled in a second, from the first rollout's beginning to the last one's end."""
        return self.sampled / self.seconds if self.seconds else 0.0


def summary(totals: Totals, wanted: int, this_run: ThisRun) -> Table:
    """Return the closing table. `wanted`: how many rollouts the command asks for."""
    table = Table(title="rollouts", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in _figures(totals, wanted, this_run):
        table.add_row(name, value)
    conserved = Text("yes", "green") if totals.conserved else Text("NO", "bold red")
    table.add_row("receipts conserved (sampled = kept + dropped)", conserved)
    return table


def _figures(totals: Totals, wanted: int, this_run: ThisRun) -> list[tuple[str, str]]:
    reward = totals.mean_reward
    return [
        ("rollouts", f"{totals.rollouts} of {wanted}"),
        *((f"  {status}", str(count)) for status, count in sorted(totals.statuses.items())),
        *((f"  failed of {cause}", str(count)) for cause, count in totals.causes.most_common()),
        ("  truncated by a limit", str(totals.truncated)),
        ("mean reward", "-" if reward is None else f"{reward:.4f}"),
        ("calls", f"{totals.calls:,}"),
        ("tokens sampled", f"{totals.sampled:,}"),
        ("  kept", f"{totals.kept:,}"),
        *((f"  dropped: {reason}", f"{count:,}") for reason, count in sorted(totals.dropped.items())),
        ("samples", f"{totals.samples:,}"),
        *((f"  split: {cause}", f"{count:,}") for cause, count in totals.splits.most_common() if count),
        ("weight versions", ", ".join(version or "(unnamed)" for version in totals.weight_versions) or "-"),
        ("in this run: rollouts", str(this_run.rollouts)),
        ("  tokens sampled, lost attempts included", f"{this_run.sampled:,}"),
        ("  tokens/s", f"{this_run.tokens_per_second:,.1f}"),
        ("  wall time", f"{this_run.seconds:,.1f} s"),
    ]
