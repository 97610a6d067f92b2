"""The oracle on what real vLLM sampled (CPU, SmolLM2-135M-Instruct in bfloat16), in both modes of log-probabilities.

Seen: mean differences of 0.012 to 0.038 in a sample, and at most 0.29 at a token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio

from support.real_engine import load_engine, shut_down
from support.scripted import RunningSidecar, sidecar_on
from tokentape.v1 import tape_pb2, types_pb2
from tokentape_executor import tape_client
from tokentape_executor.cli.main import main
from tokentape_executor.oracle import LogprobsMode, score, verify
from tokentape_executor.oracle_report import OracleReport, Tolerance, ToleranceExceeded
from tokentape_executor.tape_file import StoredTape, append_tape, download
from tokentape_executor.trajectory import Sample, Trajectory

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(480),  # an engine for each mode, on a machine that may be busy
    # vLLM's and torch's own, on import and on start; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

Sampling = types_pb2.SamplingParameters
END = 2

TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TAG = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "weather", "arguments": ',
    "content": {"type": "json_schema", "json_schema": TOOL},
    "end": "}\n</tool_call>",
}
FORCED_CALL = json.dumps({"type": "structural_tag", "format": TAG})


@dataclass(frozen=True)
class Recorded:
    """A rollout on the real engine, and the same model in transformers."""

    tape: StoredTape
    trajectory: Trajectory
    mode: LogprobsMode
    model: Any
    tokenizer: Any

    def verify(self, *samples: Sample) -> OracleReport:
        return verify(samples, self.model, logprobs_mode=self.mode, tokenizer=self.tokenizer)


async def roll_out(running: RunningSidecar, tokenizer: Any) -> StoredTape:
    """Three turns, of which the middle one is a forced tool call; two choices by top_p, top_k and min_p; a regex."""

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    client = running.client
    tape = await client.open_tape()
    sampling = Sampling(temperature=0.8, max_tokens=24, min_tokens=2)
    first = await client.generate(
        ids("<|im_start|>user\nWhat is the weather in Rome?<|im_end|>\n<|im_start|>assistant\n"),
        sampling,
        tape_id=tape.tape_id,
    )
    forced = Sampling(temperature=0.8, max_tokens=96)
    forced.structured_output.structural_tag = FORCED_CALL
    second = await client.generate(
        ids("\n<|im_start|>user\nCall the tool.<|im_end|>\n<|im_start|>assistant\n"),
        forced,
        tape_id=tape.tape_id,
        parent=types_pb2.CallReference(call_id=first.started.call_id),
    )
    third = Sampling(temperature=1.2, top_p=0.9, top_k=40, min_p=0.02, max_tokens=24, n=2)
    await client.generate(
        ids("\n<|im_start|>user\nIt is sunny.<|im_end|>\n<|im_start|>assistant\n"),
        third,
        tape_id=tape.tape_id,
        parent=types_pb2.CallReference(call_id=second.started.call_id),
    )
    number = Sampling(temperature=0.0, max_tokens=12)
    number.structured_output.regex = "[0-9]{2,6}"
    await client.generate(ids("How many? Answer: "), number, tape_id=tape.tape_id)
    await client.seal(tape)
    return await download(client.channel, tape_client.OpenedTape(tape.tape_id, tape.reader_token))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["processed", "raw"])
async def recorded(request: pytest.FixtureRequest, model_directory: Path) -> AsyncGenerator[Recorded]:
    import torch  # noqa: PLC0415 - seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415 - imports vLLM

    loader: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer
    tokenizer = tokenizers.from_pretrained(str(model_directory))
    mode: Literal["processed", "raw"] = request.param
    llm = load_engine(model_directory, logprobs_mode="raw_logprobs" if mode == "raw" else "processed_logprobs")
    try:
        async with sidecar_on(VllmEngine.attach(llm)) as running:
            tape = await roll_out(running, tokenizer)
    finally:
        await shut_down(llm)
    model = loader.from_pretrained(str(model_directory), dtype=torch.bfloat16)
    yield Recorded(tape, tape.trajectory(), LogprobsMode(mode), model, tokenizer)


async def test_a_trajectory_from_the_real_engine_verifies(recorded: Recorded) -> None:
    trajectory = recorded.trajectory
    assert [len(sample.actions) for sample in trajectory.samples] == [3, 1, 1]
    assert trajectory.receipt.dropped_total == 0
    forced = trajectory.samples[0].actions[1]
    assert "<tool_call>" in recorded.tokenizer.decode(trajectory.samples[0].tokens[forced.start : forced.end])

    report = recorded.verify(*trajectory.samples)
    assert report.compared == trajectory.receipt.kept
    assert report.refusals == []


async def test_one_corrupt_token_id_is_caught_and_named(recorded: Recorded) -> None:
    main_sample = recorded.trajectory.samples[0]
    for action in main_sample.actions:
        position = action.start + 1
        tokens = list(main_sample.tokens)
        tokens[position] = 40_000
        with pytest.raises(ToleranceExceeded, match=f"sample 0, position {position}: "):
            recorded.verify(replace(main_sample, tokens=tokens))


async def test_log_probabilities_shifted_by_one_are_caught_and_named(recorded: Recorded) -> None:
    main_sample = recorded.trajectory.samples[0]
    for action in main_sample.actions:
        logprobs = list(main_sample.logprobs)
        own = slice(action.start, action.end)
        logprobs[own] = [*logprobs[own][1:], logprobs[action.start]]
        with pytest.raises(ToleranceExceeded, match=r"sample 0, position \d+: ") as caught:
            recorded.verify(replace(main_sample, logprobs=logprobs))
        named = int(str(caught.value).split("position ")[1].split(":")[0])
        assert action.start <= named < action.end


async def test_the_other_mode_does_not_verify(recorded: Recorded) -> None:
    other = LogprobsMode.RAW if recorded.mode is LogprobsMode.PROCESSED else LogprobsMode.PROCESSED
    report = score(recorded.trajectory.samples, recorded.model, logprobs_mode=other, tokenizer=recorded.tokenizer)
    with pytest.raises(ToleranceExceeded):
        report.check(Tolerance())


async def test_the_command_verifies_the_file(
    recorded: Recorded, model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tapes.jsonl"
    append_tape(file, recorded.tape)
    arguments = ["--verify", str(file), "--model", str(model_directory)]
    status = await asyncio.to_thread(main, arguments)
    output = capsys.readouterr().out
    assert status == 0, output
    assert "fork" in output

    damaged = list(recorded.tape.entries)
    index = next(i for i, entry in enumerate(damaged) if entry.HasField("tokens_sampled"))
    entry = tape_pb2.TapeEntry()
    entry.CopyFrom(damaged[index])
    entry.tokens_sampled.token_ids[0] = 40_000
    damaged[index] = entry
    file.unlink()
    append_tape(file, replace(recorded.tape, entries=tuple(damaged)))
    status = await asyncio.to_thread(main, arguments)
    assert status == 1
    assert "tape 0, sample 0, position" in capsys.readouterr().out
