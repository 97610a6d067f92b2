"""OpenRLHF's executor on the scripted engine: as a class for tests, and as a program that does one rollout and ends.

python -m support.on_script MODEL_DIRECTORY exit|kill
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.scripted import Json, call, script, tokens
from tokentape_executor.executor import RolloutClient, Row, TapeExecutor
from tokentape_executor.openrlhf import AgentExecutor
from tokentape_sidecar.script import Script
from tokentape_sidecar.scripted_engine import ScriptedEngine

SAMPLING = SimpleNamespace(temperature=0.5, top_p=1.0, max_tokens=16, min_tokens=1, logprobs=1)
MODEL: Json = {"vocab_size": 49152, "eos_token_ids": [2], "max_model_len": 512}
FIVE = script(call({"text": "It is 5"}, tokens(2)), repeat=True, **MODEL)


class OnScript(AgentExecutor):
    """Its engine is a script, which comes as `llm_engine`."""

    starts = 0

    def _attach(self, llm_engine: Any, tokenizer_directory: Path) -> ScriptedEngine:
        self.starts += 1
        return ScriptedEngine(Script.model_validate(llm_engine), tokenizer_directory)


class Once(TapeExecutor):
    """Asks once."""

    async def run(self, task: Row, client: RolloutClient) -> float:
        await client.chat.completions.create(model=client.model, messages=task["messages"])
        return 1.0


class OnceOnScript(OnScript):
    agent = Once


def load_tokenizer(model_directory: Path) -> Any:
    """Load transformers' tokenizer, as OpenRLHF does."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

    auto_tokenizer: Any = AutoTokenizer
    return auto_tokenizer.from_pretrained(str(model_directory))


async def main(model_directory: Path, end: str) -> None:
    executor = OnceOnScript()
    result = await executor.execute("2 + 3?", "5", SAMPLING, 400, load_tokenizer(model_directory), FIVE)
    assert result["reward"] == 1.0
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    # No shutdown: the interpreter's end must do.


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
