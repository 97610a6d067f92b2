"""A trainer that ends, with or without a word: its sidecar, bridge and NeMo Gym end with it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

TRAINER = """
import asyncio, json, sys
from dataclasses import dataclass
from pathlib import Path

from tokentape.process import ListenAddress
from tokentape_executor.openrlhf import AgentExecutor
from tokentape_executor.services import Bridge
from tokentape_sidecar.script import Script
from tokentape_sidecar.scripted_engine import ScriptedEngine
from tokentape_sidecar.server import Sidecar

script, model_directory, ending = sys.argv[1:]

class Scripted(AgentExecutor):
    async def _start_vllm_server(self, llm_engine, hf_tokenizer):
        services = self._running_services()
        engine = ScriptedEngine(Script.load(Path(script)), Path(model_directory))
        sidecar = await Sidecar.start(engine, listen=ListenAddress("127.0.0.1", 0), name="scripted")
        services.on_loop.push_async_callback(sidecar.stop, grace_seconds=0)
        self.sidecar_name, self.sidecar_address, self.policy_model_name = "scripted", sidecar.address, "toy"
        services.bridge = Bridge.launch({"scripted": sidecar.address}, services.group, services.settings)

@dataclass
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16

async def main():
    result = await executor.execute("What is 2 + 3?", "5", Sampling(), 512, None, None)
    print(json.dumps(result), flush=True)
    if ending == "killed":
        await asyncio.sleep(300)

executor = Scripted()
asyncio.run(main())
if ending == "loop gone":
    executor.shutdown()
"""


@pytest.mark.parametrize("ending", ["loop gone", "silent", "killed"])
async def test_nothing_outlives_the_trainer(tmp_path: Path, model_directory: Path, ending: str) -> None:
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
    family: list[psutil.Process] = []
    result = asyncio.create_task(trainer.stdout.readline())
    while not result.done():
        # Those that are running now; a trainer may end at once after its result.
        family = psutil.Process(trainer.pid).children(recursive=True) or family
        await asyncio.wait([result], timeout=0.1)
    ended = time.monotonic()
    if ending == "killed":
        trainer.kill()
    status = await trainer.wait()
    alive = psutil.wait_procs(family, timeout=5.0 - (time.monotonic() - ended))[1]

    ((start, end),) = json.loads(result.result())["action_ranges"]
    assert json.loads(result.result())["observation_tokens"][start:end] == [40, 41, 42, 2]
    assert status == (-signal.SIGKILL if ending == "killed" else 0)
    assert len(family) > 20
    assert alive == []
