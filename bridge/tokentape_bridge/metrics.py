"""The bridge's metrics, for Prometheus: `GET /metrics`.

Names and units are vLLM's and its HTTP server's where they mean the same, `tokentape:` for the bridge's own. With
several workers each writes into files of one directory, `PROMETHEUS_MULTIPROC_DIR`, so that whichever is asked answers
for all; prometheus_client reads that variable when it is first imported.
"""

from __future__ import annotations

import os

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import (
    MultiProcessCollector,
    mark_process_dead,  # pyright: ignore[reportUnknownVariableType]
)

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that names the directory that the workers share."""

MEDIA_TYPE = CONTENT_TYPE_LATEST
"""What `exposition` is."""

_SECONDS = (0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)

REQUESTS = Counter("http_requests_total", "HTTP requests answered.", ["method", "handler", "status"])
DURATION = Histogram(
    "http_request_duration_seconds",
    "From a request's head to the last byte of its answer.",
    ["method", "handler"],
    buckets=_SECONDS,
)
IN_FLIGHT = Gauge("tokentape:http_requests_in_flight", "HTTP requests being served.", multiprocess_mode="livesum")
PROMPT_TOKENS = Counter("vllm:prompt_tokens", "Prompt tokens of the calls that sidecars have started.", ["model_name"])
GENERATION_TOKENS = Counter("vllm:generation_tokens", "Sampled tokens that sidecars have sent.", ["model_name"])
FIRST_TOKEN = Histogram(
    "vllm:time_to_first_token_seconds",
    "From a call to a sidecar to its first token.",
    ["model_name"],
    buckets=_SECONDS,
)
CALLS = Counter(
    "tokentape:sidecar_calls",
    "Calls that sidecars were asked to sample and that have ended, by gRPC status.",
    ["sidecar", "code"],
)
CALLS_RUNNING = Gauge(
    "tokentape:sidecar_calls_running", "Such calls that have not ended.", ["sidecar"], multiprocess_mode="livesum"
)
SIDECAR_SERVES = Gauge(
    "tokentape:sidecar_serves",
    "1 while the sidecar serves this bridge, else 0.",
    ["sidecar"],
    multiprocess_mode="livemin",
)
TAPE_CALLS = Counter(
    "tokentape:tape_calls",
    "Calls on tapes: whether the prompt kept the very ids of an earlier call, and if not, why.",
    ["prefix", "split_cause"],
)


def exposition() -> bytes:
    """Return all metrics, of all workers, in Prometheus's text format."""
    if DIRECTORY_VARIABLE not in os.environ:
        return generate_latest(REGISTRY)
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return generate_latest(registry)


def forget_worker(pid: int, directory: str) -> None:
    """Take what a worker that has ended was doing out of the gauges; what it has counted stays."""
    mark_process_dead(pid, directory)
