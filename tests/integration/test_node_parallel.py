"""E14: executors of one machine that start at once and share nothing: each with its sidecar, its keeper, its bridge.

Eight sets at once, three times over (24 sets take half a minute on two cores); each serves a call, at ports of its own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from support.nodes import own_temporary_directory, processes_of

SETS, ROUNDS = 8, 3

SET = """
import asyncio, json, sys
import httpx
from pathlib import Path
from tokentape.listen import ListenAddress
from tokentape_executor.node import NodeMember, NodeSpec
from tokentape_sidecar.script import Script
from tokentape_sidecar.scripted_engine import ScriptedEngine
from tokentape_sidecar.server import Sidecar
from tokentape_sidecar.listener import Listener

async def main():
    group, script, tokenizer = sys.argv[1:]
    engine = ScriptedEngine(Script.model_validate_json(script), Path(tokenizer))
    sidecar = await Sidecar.start(engine, data=Listener(ListenAddress("127.0.0.1", 0)), name="main")
    member = await NodeMember.join(NodeSpec(group, (), None, None, 60.0), {"main": sidecar.address})
    url = await member.bridge_url()
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        body = {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True}
        answer = (await http.post(f"{url}/chat/completions", json=body)).json()
    told = {"sidecar": sidecar.address, "bridge": url, "sampled": answer["choices"][0]["token_ids"]}
    print(json.dumps(told), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.to_thread(member.leave)
    await sidecar.stop(grace_seconds=0)

asyncio.run(main())
"""


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    tmp_path_factory.getbasetemp()  # which would else be made in there
    with own_temporary_directory(monkeypatch) as directory:
        yield directory


async def start(number: int, tokenizer: Path) -> asyncio.subprocess.Process:
    # Sampled tokens tell the sets apart: whoever is answered by another's sidecar is found out.
    steps = [{"token_ids": [1000 + number, 2], "finish_reason": "stop"}]
    model = {"name": "toy", "max_model_len": 512, "vocab_size": 49152, "eos_token_ids": [2]}
    script = json.dumps({"model": model, "calls": [{"steps": steps}], "repeat": True})
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SET, f"set {number}", script, str(tokenizer)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def told(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    assert process.stderr is not None
    line = await process.stdout.readline()
    assert line, (await process.stderr.read()).decode()
    return json.loads(line)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("again", range(ROUNDS))
async def test_e14_sets_that_start_at_once_all_serve_at_ports_of_their_own(
    root: Path, model_directory: Path, again: int
) -> None:
    sets = await asyncio.gather(*(start(number, model_directory) for number in range(SETS)))
    try:
        answers = await asyncio.gather(*(told(process) for process in sets))
        addresses = {answer[part].removeprefix("http://") for answer in answers for part in ("sidecar", "bridge")}
        assert len(addresses) == 2 * SETS
        assert [answer["sampled"] for answer in answers] == [[1000 + number, 2] for number in range(SETS)]
        ended = await asyncio.gather(*(process.communicate(b"") for process in sets))
        assert [process.returncode for process in sets] == [0] * SETS, ended
        assert processes_of(root) == []
    finally:
        for process in sets:
            if process.returncode is None:
                process.kill()
                await process.wait()
