"""docs/operations.md, pasted; and its tables of metrics, against what is exported."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from support.curls import assert_same_calls
from support.readme import Reader, blocks, free_port

pytestmark = pytest.mark.timeout(240)

NOT_OURS = re.compile(r"(process|python)_")
"""prometheus_client's own."""


@pytest.fixture
def page(checkout: Path) -> Path:
    return checkout / "docs" / "operations.md"


@pytest.fixture
def reader(checkout: Path, model_directory: Path, tmp_path: Path) -> Reader:
    assert model_directory.is_relative_to(checkout)
    return Reader(checkout, tmp_path, {port: free_port() for port in (50051, 9090, 8000)})


def test_the_page_runs(page: Path, reader: Reader) -> None:
    start, health, metrics, logs, end = (
        blocks(page, heading, "sh") for heading in ("Start", "Health", "Metrics", "Logs", "What to do when")
    )
    assert assert_same_calls(*health)
    by_buf = [text for text in health if text.startswith("buf")]
    python = [f"python - <<'EOT'\n{text}EOT" for text in blocks(page, "Time limits", "python")]
    keep = ["cp $RUN/*.metrics out/; tr -d '\\n' < $RUN/sidecar.json > out/ready.json"]
    output = reader.paste(*start, *by_buf, *metrics, *logs, *python, *keep, *end, seconds=200)

    out = reader.directory / "out"
    ready = json.loads((out / "ready.json").read_text())
    assert set(ready) == {"address", "pid", "metrics"}
    assert '"SERVING"' in output
    assert re.search(r'^tokentape:generation_tokens_total\{model_name="scripted"\} [1-9]', output, re.MULTILINE)
    assert "{'INFO'}" in output
    assert "2 + 3 = 5" in output
    assert json.loads(output.strip().splitlines()[-1])["message"] == "stopping; 0 calls are running"
    for metrics_file, column in (("sidecar.metrics", "Sidecar"), ("bridge.metrics", "Bridge")):
        told, found = told_metrics(page, column), exported(out / metrics_file)
        assert set(told) == set(found)
        # A metric that counts nothing yet has no labels yet.
        assert {name: told[name] for name, labels in found.items() if labels} == {k: v for k, v in found.items() if v}


def told_metrics(page: Path, column: str) -> dict[str, set[str]]:
    """The metrics of a table, with their labels."""
    table = page.read_text().split(f"| {column} | Labels | |\n")[1].split("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[1:]]
    return {row[0].strip("| `"): set(re.findall(r"`(\w+)`", row[1])) for row in rows}


def exported(file: Path) -> dict[str, set[str]]:
    """The metrics of a scrape, as the table names them."""
    return dict(_exported(file.read_text()))


def _exported(text: str) -> Iterator[tuple[str, set[str]]]:
    for family in text_string_to_metric_families(text):
        if not NOT_OURS.match(family.name) and not family.name.endswith("_created"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield name, {label for sample in family.samples for label in sample.labels} - {"le"}


def test_the_other_blocks_are_what_they_seem(page: Path) -> None:
    (unit,) = blocks(page, "Start", "ini")
    assert "ExecStart=" in unit
    (probes,) = blocks(page, "Start", "yaml")
    assert set(yaml.safe_load(probes)) == {"startupProbe", "readinessProbe", "terminationGracePeriodSeconds"}
    (queries,) = blocks(page, "Metrics", "promql")
    known = told_metrics(page, "Sidecar") | told_metrics(page, "Bridge")
    for name in re.findall(r"tokentape:\w+", queries):
        assert name.removesuffix("_bucket") in known
    toml = re.search(r"`(vllm = \{.*?\})`", page.read_text())
    assert toml is not None
    assert tomllib.loads(toml[1])["vllm"]["dtype"] == "bfloat16"
