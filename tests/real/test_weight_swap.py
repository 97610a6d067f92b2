"""Weights swapped from disk in the middle of eight rollouts: a `tokentape-sidecar` with real vLLM (CPU, SmolLM2).

The two checkpoints differ in every tensor but the embedding, which is tied to the output layer: this CPU build reloads
a changed one wrongly. The swap clears the cache, so that what a call had computed by the old weights is computed anew
by the new ones: each token after it has the log-probability that the new checkpoint gives it, given all before it.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from support import checkpoints
from support.controlled import ABORT, KEEP, WAIT, Call, Controller
from support.real_engine import CPU_ENVIRONMENT, QUESTIONS
from support.refusals import refused
from support.scripted import SidecarProcess, sidecar_process
from support.sidecar_client import SidecarClient
from tokentape.v1 import control_pb2, types_pb2
from tokentape_executor import tape_client
from tokentape_executor.oracle import score
from tokentape_executor.oracle_report import OracleReport, SampleReport, Tolerance, ToleranceExceeded
from tokentape_executor.tape_file import download
from tokentape_executor.trajectory import Sample

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    # vLLM's and torch's own, on import and on start; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

Status = grpc.StatusCode
ROLLOUTS, TOKENS, BEFORE = 8, 120, 40
OLD, NEW = "step-1", "step-2"
BROKEN = "an update of the weights failed half way"


@dataclass(frozen=True)
class Stack:
    """The process, clients of it, and both checkpoints in transformers."""

    process: SidecarProcess
    client: SidecarClient
    controller: Controller
    models: dict[str, Any]
    tokenizer: Any

    async def start(self, count: int = ROLLOUTS, max_tokens: int = TOKENS) -> list[Call]:
        """Start rollouts of one call each, and return when all have sampled for a while."""
        sampling = types_pb2.SamplingParameters(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
        calls: list[Call] = []
        for question in QUESTIONS[:count]:
            text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            prompt = self.tokenizer.encode(text, add_special_tokens=False)
            tape = await self.client.open_tape()
            generating = self.client.generate(prompt, sampling, tape_id=tape.tape_id)
            calls.append(Call(tape, asyncio.create_task(generating)))
        return calls

    async def until_sampled(self, calls: Sequence[Call], least: int) -> None:
        """Return when each call has this many tokens."""
        async with asyncio.timeout(90):
            while min([await self._sampled(call) for call in calls]) < least:  # noqa: ASYNC110 - told to those who ask
                await asyncio.sleep(0.05)

    async def _sampled(self, call: Call) -> int:
        return sum(len(entry.tokens_sampled.token_ids) for entry in await self.client.entries(call.tape))

    async def sample(self, call: Call) -> Sample:
        """The one sample of a call's tape."""
        await call.generating
        await self.client.seal(call.tape)
        opened = tape_client.OpenedTape(call.tape.tape_id, call.tape.reader_token)
        [sample] = (await download(self.client.channel, opened)).trajectory().samples
        return sample

    def compare(self, sample: Sample, version: str, checkpoint: str) -> SampleReport:
        """How far the tokens of `version` are from a checkpoint."""
        [report] = score([sample], self.models[checkpoint], weight_versions=[version], tokenizer=self.tokenizer).samples
        return report


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Stack]:
    import torch  # noqa: PLC0415 - seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    root = tmp_path_factory.mktemp("checkpoints")
    checkpoints.write(model_directory, root / OLD, lambda tensors: tensors)
    checkpoints.write(model_directory, root / NEW, checkpoints.all_but_the_embedding)
    checkpoints.write(model_directory, root / "misshapen", checkpoints.one_of_another_shape)
    checkpoints.write(model_directory, root / "lacking", checkpoints.one_lacking)
    truncated = checkpoints.write(model_directory, root / "truncated", lambda tensors: tensors) / "model.safetensors"
    os.truncate(truncated, truncated.stat().st_size - 1)
    checkpoints.write(model_directory, root / "part", checkpoints.one_lacking)
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (root / "part" / "model.safetensors.index.json").write_text(json.dumps(index))
    loader: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer
    models = {name: loader.from_pretrained(str(root / name), dtype=torch.bfloat16) for name in (OLD, NEW)}
    os.environ |= CPU_ENVIRONMENT
    vllm_options = ["--", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "1024"]
    with tempfile.TemporaryDirectory(prefix="tokentape-") as sockets:
        socket = f"unix:{sockets}/control.sock"
        arguments = ["--model", str(model_directory), "--control", socket, "--weights-root", str(root)]
        async with sidecar_process(
            *arguments, *vllm_options, directory=tmp_path_factory.mktemp("sidecar"), seconds=400
        ) as process:
            children = psutil.Process(process.process.pid).children(recursive=True)
            controller = Controller(socket)
            async with SidecarClient(process.address) as client:
                await controller.stub.SetWeightVersion(control_pb2.SetWeightVersionRequest(weight_version="1"))
                tokenizer = tokenizers.from_pretrained(str(model_directory))
                yield Stack(process, client, controller, models, tokenizer)
            await controller.channel.close()
    for child in children:
        if child.is_running():
            child.kill()


async def test_tokens_before_and_after_a_swap_agree_with_their_own_checkpoint_alone(stack: Stack) -> None:
    calls = await stack.start()
    await stack.until_sampled(calls, BEFORE)
    await stack.controller.update(NEW, "2")
    assert await stack.controller.phase() == "RUNNING"
    samples = [await stack.sample(call) for call in calls]

    rows, mine, others = [header()], list[SampleReport](), list[SampleReport]()
    for number, sample in enumerate(samples):
        assert [span.weight_version for span in sample.version_spans] == ["1", "2"]
        for version, own, other in (("1", OLD, NEW), ("2", NEW, OLD)):
            mine.append(stack.compare(sample, version, own))
            others.append(stack.compare(sample, version, other))
            rows.append(row(number, version, mine[-1], others[-1]))
            # The tokens of the other version, and no others: no boundary is uncertain, no cache stale.
            assert {refusal.reason for refusal in mine[-1].refusals} == {
                f"of weight version '{'2' if version == '1' else '1'}', which is not the model's"
            }
        before, after = mine[-2:]
        assert len(before.positions) + len(after.positions) == TOKENS
        assert len(before.positions) >= BEFORE
    print("", *rows, sep="\n")  # noqa: T201 - pytest -s shows them

    OracleReport(mine).check(Tolerance(mean=2 * Tolerance().mean))
    assert OracleReport(mine).mean < Tolerance().mean
    for by_own, by_other in zip(mine, others, strict=True):
        with pytest.raises(ToleranceExceeded):
            OracleReport([by_other]).check(Tolerance(mean=2 * Tolerance().mean))
        assert by_other.mean > 3 * by_own.mean
    check_the_boundary(stack, samples)


def check(report: SampleReport) -> None:
    """Raise `ToleranceExceeded` where a short sample's differences are more than bfloat16 explains."""
    OracleReport([report]).check(Tolerance(mean=2 * Tolerance().mean))


def header() -> str:
    return (
        f"{'rollout':>7} {'version':>7} {'tokens':>6} {'own max|Δ|':>11} {'mean':>6} {'other max|Δ|':>13} {'mean':>6}"
    )


def row(number: int, version: str, own: SampleReport, other: SampleReport) -> str:
    return (
        f"{number:>7} {version:>7} {len(own.positions):>6} {own.largest:>11.3f} {own.mean:>6.3f} "
        f"{other.largest:>13.3f} {other.mean:>6.3f}"
    )


def check_the_boundary(stack: Stack, samples: Sequence[Sample]) -> None:
    """Tokens on either side of the recorded boundary are of its own weights: eight tokens off, they would not be."""
    near = {"own": 0.0, "other": 0.0}
    for sample in samples:
        for version, own, other, side in (("1", OLD, NEW, slice(-8, None)), ("2", NEW, OLD, slice(0, 8))):
            near["own"] += sum(stack.compare(sample, version, own).differences[side])
            near["other"] += sum(stack.compare(sample, version, other).differences[side])
    assert near["other"] > 3 * near["own"], near


async def test_after_an_update_that_failed_half_way_another_brings_the_engine_back(stack: Stack) -> None:
    with refused(Status.NOT_FOUND, r"^directory: model\.safetensors is not a whole safetensors file"):
        await stack.controller.update("truncated", "3")
    with refused(Status.NOT_FOUND, r"^directory: .* model-00002-of-00002\.safetensors is not there"):
        await stack.controller.update("part", "3")
    assert await stack.controller.phase() == "RUNNING"
    for directory, words in (("misshapen", r"dimension size \(191\)"), ("lacking", "the checkpoint lacks 1 of ")):
        calls = await stack.start(2)
        await stack.until_sampled(calls, 4)
        with refused(Status.INTERNAL, words):
            await stack.controller.update(directory, "3")
        for call in calls:
            with refused(Status.UNAVAILABLE, BROKEN):
                await call.generating
        state = await stack.controller.state()
        assert state.state == control_pb2.ENGINE_STATE_WEIGHTS_BROKEN
        assert directory in state.problem
        assert await stack.client.health_of() == health_pb2.HealthCheckResponse.NOT_SERVING
        with refused(Status.UNAVAILABLE, BROKEN):
            await stack.client.generate()
        await stack.controller.update(NEW, "3")
        assert await stack.client.health_of() == health_pb2.HealthCheckResponse.SERVING
    calls = await stack.start(2, max_tokens=48)
    for call in calls:
        check(stack.compare(await stack.sample(call), "3", NEW))


async def test_pauses_of_real_vllm_keep_wait_and_abort(stack: Stack) -> None:
    await stack.controller.update(OLD, "4")
    calls = await stack.start(4)
    await stack.until_sampled(calls, 4)
    await stack.controller.pause(KEEP)
    before = [len(await stack.client.entries(call.tape)) for call in calls]
    await asyncio.sleep(0.5)
    assert [len(await stack.client.entries(call.tape)) for call in calls] == before
    await stack.controller.resume()
    with refused(Status.DEADLINE_EXCEEDED, ""):
        await stack.controller.stub.PauseGeneration(control_pb2.PauseGenerationRequest(mode=WAIT), timeout=0.3)
    late = await stack.start(1)
    await stack.until_sampled([*calls, *late], 8)
    await stack.controller.pause(WAIT)
    assert all(call.generating.done() for call in [*calls, *late])
    check(stack.compare(await stack.sample(late[0]), "4", OLD))
    waiting = await stack.start(1)
    assert await stack.controller.phase() == "PAUSED"
    await stack.controller.pause(ABORT)
    assert (await waiting[0].generating).finish_reason() == types_pb2.FINISH_REASON_ABORT
    await stack.controller.stub.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest())
    await stack.controller.resume()
    assert await stack.controller.phase() == "RUNNING"


async def test_a_cpu_has_no_memory_to_release(stack: Stack) -> None:
    with refused(Status.UNIMPLEMENTED, "--enable-sleep-mode"):
        await stack.controller.stub.Sleep(control_pb2.SleepRequest())
    with refused(Status.INVALID_ARGUMENT, "^weight_version: 'default' is what vLLM calls"):
        await stack.controller.update(NEW, "default")
    assert await stack.controller.phase() == "RUNNING"
