"""A sidecar under many rollouts for long: are tokens lost or repeated, does it leave anything behind, does it grow?

    python -m bench.soak [--rollouts 1000] [--seconds 600]

A `tokentape-sidecar --engine scripted` in a process of its own; in this one the rollouts (`soak_rollouts`), each with a
tape, a watcher and one to three calls of some seconds. They leave calls, have them aborted, let them run out of
time and retry them; they seal tapes while calls run, delete them, forget them; their watchers disconnect, read slowly
or not at all. Every token is checked against what the script must have produced. When all is over, what was opened must
be closed, as the sidecar's own metrics tell it. Prints a table; the exit code is 0 if everything holds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from bench.soak_rollouts import Rollouts
from bench.soak_script import Script
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from tokentape.channel import dial
from tokentape.v1 import generation_pb2, generation_pb2_grpc

TOKENIZER = Path(__file__).parent.parent / "tests" / "support" / "toy_tokenizer"
MOST_GROWTH_BYTES = 20 * 1024 * 1024
SETTLE_SECONDS = 60
"""How long the sidecar may take to close what the last rollout left."""

GAUGES = {
    "calls running": "tokentape:calls_running",
    "tapes held": "tokentape:tapes",
    "watchers": "tokentape:tape_watchers",
    "asyncio tasks": "tokentape:asyncio_tasks",
    "file descriptors": "process_open_fds",
}
"""What is to be at the end what it was at the beginning."""


class Soaking:
    """The sidecar and what its metrics say."""

    def __init__(self, address: str, metrics_address: str) -> None:
        self.address = address
        self._metrics = httpx.AsyncClient(base_url=f"http://{metrics_address}", timeout=30)

    async def read(self) -> dict[str, float]:
        """All metrics, samples of several labels added up."""
        text = (await self._metrics.get("/metrics")).text
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0) + sample.value
        return values

    async def gauges(self) -> dict[str, float]:
        values = await self.read()
        return {name: values[metric] for name, metric in GAUGES.items()}

    async def close(self) -> None:
        await self._metrics.aclose()


@dataclass(slots=True)
class Memory:
    """The sidecar's resident memory, in bytes."""

    samples: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    async def watch(self, soaking: Soaking, interval_seconds: float) -> None:
        while True:
            self.samples.append((time.monotonic(), (await soaking.read())["process_resident_memory_bytes"]))
            await asyncio.sleep(interval_seconds)

    def between(self, begin: float, end: float) -> float:
        """The median of the samples of that time."""
        return statistics.median(value for at, value in self.samples if begin <= at <= end)


@contextmanager
def sidecar(script: Script, directory: Path) -> Generator[tuple[str, str]]:
    """Run a sidecar on the script; gives its address and that of its metrics."""
    script_file, ready = directory / "script.json", directory / "ready.json"
    script_file.write_text(json.dumps(script.content()))
    command = [
        str(Path(sys.executable).with_name("tokentape-sidecar")), "--engine", "scripted",
        "--script", str(script_file), "--tokenizer", str(TOKENIZER), "--name", "soak",
        "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--ready-file", str(ready),
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit(f"the sidecar exited with {process.returncode}")
            time.sleep(0.05)
        told = json.loads(ready.read_text())
        yield told["address"], told["metrics"]
        process.terminate()
        if code := process.wait(30):
            raise SystemExit(f"the sidecar exited with {code}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


async def idle_gauges(soaking: Soaking) -> dict[str, float]:
    """What is open when nobody is there, but somebody was: what is made once is there from then on."""
    async with dial(soaking.address) as channel:
        await generation_pb2_grpc.GenerationServiceStub(channel).GetModel(generation_pb2.GetModelRequest())
    gauges: dict[str, float] = {}
    while gauges != (gauges := await soaking.gauges()):  # noqa: ASYNC110 - of another process
        await asyncio.sleep(2)
    return gauges


async def settled(soaking: Soaking, before: dict[str, float]) -> dict[str, float]:
    """Return what is open when it is no more than before, or after `SETTLE_SECONDS`."""
    ends = time.monotonic() + SETTLE_SECONDS
    # A call that ended by an error is in a cycle with its traceback, and holds this side's end of its connection.
    gc.collect()
    while (after := await soaking.gauges()) != before and time.monotonic() < ends:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.5)
    return after


async def soak(soaking: Soaking, script: Script, options: argparse.Namespace) -> bool:
    """Run it all and print the table; whether everything holds."""
    before = await idle_gauges(soaking)
    memory, rollouts = Memory(), Rollouts(soaking.address, script, options.seed)
    window = options.seconds / 10
    watching = asyncio.create_task(memory.watch(soaking, min(1, window / 5)))
    began = time.monotonic()
    await rollouts.run(options.rollouts, options.seconds)
    after = await settled(soaking, before)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    warm = began + options.seconds * 0.3
    ended = began + options.seconds
    first, last = memory.between(warm, warm + window), memory.between(ended - window, ended)
    return report(rollouts, await soaking.read(), gauges=(before, after), memory=(first, last))


def report(
    rollouts: Rollouts,
    metrics: dict[str, float],
    *,
    gauges: tuple[dict[str, float], dict[str, float]],
    memory: tuple[float, float],
) -> bool:
    """Print what came of it; whether everything holds."""
    (before, after), (first, last) = gauges, memory
    table = Table("", "before", "after", "", title="soak")
    good = True

    def row(name: str, one: object, other: object, *, holds: bool) -> None:
        nonlocal good
        good = good and holds
        table.add_row(name, str(one), str(other), "ok" if holds else "WRONG")

    for name, count in sorted(rollouts.counts.items()):
        table.add_row(name, "", f"{count:,}", "")
    row("tokens lost or repeated", 0, 0, holds=rollouts.counts["tokens checked"] > 0)
    for name in GAUGES:
        row(name, int(before[name]), int(after[name]), holds=before[name] == after[name])
    started, ended = metrics["tokentape:tape_calls_total"], metrics["tokentape:calls_ended_total"]
    row("calls started, ended", int(started), int(ended), holds=started == ended)
    opened = metrics["tokentape:tapes_opened_total"]
    told = rollouts.counts["tapes opened"]
    row("tapes opened, by the clients and the sidecar", told, int(opened), holds=told == opened)
    mib = 1024 * 1024
    row("resident memory, MiB", f"{first / mib:.1f}", f"{last / mib:.1f}", holds=last - first < MOST_GROWTH_BYTES)
    Console(width=120).print(table)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description="Many rollouts against one sidecar.")
    parser.add_argument("--rollouts", type=int, default=1000, help="how many at once (default: 1000)")
    parser.add_argument("--seconds", type=float, default=600, help="for how long (default: 600)")
    parser.add_argument("--seed", type=int, default=1, help="of the script and of what rollouts do (default: 1)")
    options = parser.parse_args()
    script = Script(options.seed)

    async def run(address: str, metrics_address: str) -> bool:
        soaking = Soaking(address, metrics_address)
        try:
            return await soak(soaking, script, options)
        finally:
            await soaking.close()

    with tempfile.TemporaryDirectory() as directory, sidecar(script, Path(directory)) as addresses:
        return 0 if asyncio.run(run(*addresses)) else 1


if __name__ == "__main__":
    sys.exit(main())
