"""Reading a scrape."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

_ORDER = (
    *("method", "handler", "status", "model_name", "sidecar", "code", "prefix", "split_cause", "le"),
    *("outcome", "reason", "state", "limit"),
)


def samples_of(response: httpx.Response) -> Mapping[tuple[str, ...], float]:
    """The values of an answer of `/metrics`, by name and labels: (`http_requests_total`, `GET`, `/health`, `200`)."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *(sample.labels[label] for label in _ORDER if label in sample.labels)): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
