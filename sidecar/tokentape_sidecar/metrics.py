"""The sidecar's metrics, for Prometheus.

Names and units are vLLM's where they mean the same, with `tokentape:` before them: vLLM's own are in the same registry,
and count what the engine got, whoever gave it. All values are read when they are asked for, on the event loop that
changes them; nothing here costs a call anything. `docs/operations.md` has the list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from tokentape_sidecar.calls import Calls
from tokentape_sidecar.control import Control
from tokentape_sidecar.control_states import State
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.limits import Limits
from tokentape_sidecar.statistics import CallStatistics, Distribution
from tokentape_sidecar.tape_store import TapeStore

_READ_SECONDS = 5.0
"""How long a scrape waits for the event loop."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A sidecar, as its metrics see it."""

    name: str
    engine: Engine
    calls: Calls
    tapes: TapeStore
    limits: Limits
    control: Control

    @property
    def serves(self) -> bool:
        """Whether calls are taken."""
        return self.control.serves and self.calls.accepting


class SidecarCollector(Collector):
    """Reads one sidecar's metrics, from any thread but that of its event loop."""

    def __init__(self, measured: Measured) -> None:
        """Make it on the sidecar's event loop."""
        self._measured = measured
        self._loop = asyncio.get_running_loop()

    @override
    def collect(self) -> Iterable[Metric]:
        """Return all metrics as of one moment. Raises `TimeoutError` where the event loop is blocked."""
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(_READ_SECONDS)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry would otherwise read all metrics to learn their names."""
        return []

    async def _read(self) -> list[Metric]:
        tasks = len(asyncio.all_tasks(self._loop))
        return [
            *families(self._measured),
            GaugeMetricFamily("tokentape:asyncio_tasks", "Tasks of the sidecar's event loop.", tasks),
        ]


def families(measured: Measured) -> Iterator[Metric]:
    """Yield the metrics of a sidecar as it is now."""
    yield from _engine(measured)
    yield from _calls(measured.calls, measured.calls.statistics, measured.engine.model.name)
    yield from _tapes(measured.tapes, measured.calls.statistics)
    yield _labelled_gauge(
        "tokentape:limit", "What the sidecar's owner has limited, by option.", "limit", asdict(measured.limits)
    )


def _engine(measured: Measured) -> Iterator[Metric]:
    model = measured.engine.model
    told = {"sidecar": measured.name, "model_name": model.name, "version": version("tokentape")}
    told |= {"engine": model.engine, "engine_version": model.engine_version}
    states = {state.name.lower(): int(state is measured.control.state) for state in State}
    yield InfoMetricFamily("tokentape:sidecar", "What serves here.", told)
    yield GaugeMetricFamily(
        "tokentape:serving", "1 while calls are taken, as the health service says.", int(measured.serves)
    )
    yield _labelled_gauge("tokentape:engine_state", "What the engine is doing: 1 at one state.", "state", states)
    yield InfoMetricFamily(
        "tokentape:weights",
        "The weights that would sample the next token.",
        {"weight_version": measured.engine.weight_version},
    )
    changes = "Changes of the engine's weights that have begun, through the sidecar or past it."
    yield CounterMetricFamily("tokentape:weight_changes", changes, measured.control.weight_change_count)
    stalls = "Times that the engine was found to have stalled."
    yield CounterMetricFamily("tokentape:engine_stalls", stalls, measured.calls.statistics.stalls)


def _calls(calls: Calls, statistics: CallStatistics, model: str) -> Iterator[Metric]:
    yield GaugeMetricFamily("tokentape:calls_running", "Calls that have not ended.", calls.running_count)
    yield _labelled_counter(
        "tokentape:calls_ended",
        "Calls that have ended, by outcome.",
        ["outcome"],
        {(k,): v for k, v in statistics.ended.items()},
    )
    yield _labelled_counter(
        "tokentape:calls_refused",
        "Calls that were answered with an error before anything else, by reason.",
        ["reason"],
        {(k,): v for k, v in statistics.refused.items()},
    )
    prompt = "Prompt tokens of the calls given to the engine."
    yield _labelled_counter("tokentape:prompt_tokens", prompt, ["model_name"], {(model,): statistics.prompt_tokens})
    sampled = "Tokens sampled."
    yield _labelled_counter(
        "tokentape:generation_tokens", sampled, ["model_name"], {(model,): calls.sampled_token_count}
    )
    yield _histogram(
        "tokentape:time_to_first_token_seconds",
        "From a call's start to its first token, of ended calls.",
        model,
        statistics.first_token_seconds,
    )
    yield _histogram(
        "tokentape:e2e_request_latency_seconds", "From a call's start to its end.", model, statistics.call_seconds
    )


def _tapes(tapes: TapeStore, statistics: CallStatistics) -> Iterator[Metric]:
    held = tapes.held()
    yield GaugeMetricFamily("tokentape:tapes", "Tapes held.", len(held))
    yield CounterMetricFamily("tokentape:tapes_opened", "Tapes opened.", tapes.opened_count)
    yield GaugeMetricFamily("tokentape:tape_bytes", "Memory of the tapes held.", sum(tape.size_bytes for tape in held))
    watchers = sum(tape.watcher_count for tape in held)
    yield GaugeMetricFamily("tokentape:tape_watchers", "Streams that follow a tape now.", watchers)
    yield _labelled_counter(
        "tokentape:tape_calls",
        "Calls on tapes: whether the prompt kept the very ids of an earlier call, and if not, why.",
        ["prefix", "split_cause"],
        statistics.on_tapes,
    )


def _labelled_counter(name: str, text: str, labels: list[str], values: dict[tuple[str, ...], int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _labelled_gauge(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for label_value, value in values.items():
        family.add_metric([label_value], value)
    return family


def _histogram(name: str, text: str, model: str, distribution: Distribution) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["model_name"])
    total, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip((*distribution.bounds, float("inf")), distribution.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
    family.add_metric([model], buckets, distribution.sum)
    return family
