"""A trainer that ends, with or without a word: its sidecar, and its node's bridge and NeMo Gym, end with it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.marked import Marked, marked
from support.nodes import is_alive, words_of
from support.roles import NODE, roles_of
from support.waiting import eventually

__all__ = ["marked"]

TRAINER = """
import asyncio, json, sys
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from tokentape_executor.openrlhf import AgentExecutor
from tokentape_sidecar.script import Script
from tokentape_sidecar.scripted_engine import ScriptedEngine

script, model_directory, ending = sys.argv[1:]

class Scripted(AgentExecutor):
    def _attach(self, llm_engine, tokenizer_directory):
        return ScriptedEngine(Script.load(Path(script)), tokenizer_directory)

@dataclass
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16

async def main():
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    result = await executor.execute("What is 2 + 3?", "5", Sampling(), 512, tokenizer, None)
    print(json.dumps(result), flush=True)
    if ending == "killed":
        await asyncio.sleep(300)

executor = Scripted()
asyncio.run(main())
if ending == "loop gone":
    executor.shutdown()
"""


@pytest.mark.parametrize("ending", ["loop gone", "silent", "killed"])
async def test_nothing_outlives_the_trainer(marked: Marked, tmp_path: Path, model_directory: Path, ending: str) -> None:
    script = tmp_path / "script.json"
    model = {"name": "toy", "max_model_len": 512, "vocab_size": 49152, "eos_token_ids": [2]}
    steps = [{"token_ids": [40, 41, 42]}, {"token_ids": [2], "finish_reason": "stop"}]
    script.write_text(json.dumps({"model": model, "calls": [{"steps": steps}]}))
    (tmp_path / "trainer.py").write_text(TRAINER)
    trainer = await asyncio.create_subprocess_exec(
        *(sys.executable, str(tmp_path / "trainer.py"), str(script), str(model_directory), ending),
        stdout=subprocess.PIPE,
    )
    assert trainer.stdout is not None
    family: dict[psutil.Process, str] = {}
    result = asyncio.create_task(trainer.stdout.readline())
    while not result.done():
        # With their command lines: a trainer may end at once after its result.
        family |= {process: words_of(process) for process in marked.processes()}
        await asyncio.wait([result], timeout=0.2)
    if ending == "killed":
        trainer.kill()
    status = await trainer.wait()
    await eventually(lambda: not any(map(is_alive, family)), seconds=30)

    ((start, end),) = json.loads(result.result())["action_ranges"]
    assert json.loads(result.result())["observation_tokens"][start:end] == [40, 41, 42, 2]
    assert status == (-signal.SIGKILL if ending == "killed" else 0)
    assert roles_of(family.values()) >= NODE
    assert [words_of(process) for process in marked.processes()] == []
