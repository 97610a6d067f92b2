"""Agents for `tokentape-rollout --agent`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tokentape_executor.executor import RolloutClient, Row, TapeExecutor


class Asker(TapeExecutor):
    """Asks twice. Fails while the file that the task names in `fails_while` is there."""

    async def run(self, task: Row, client: RolloutClient) -> float:
        question = {"role": "user", "content": task["question"]}
        answer = await client.chat.completions.create(model=client.model, messages=[question])  # pyright: ignore[reportArgumentType]
        again = [question, answer.choices[0].message, {"role": "user", "content": "And then?"}]
        await client.chat.completions.create(model=client.model, messages=again)  # pyright: ignore[reportArgumentType]
        if await asyncio.to_thread(Path(task.get("fails_while", "/none")).exists):
            raise ValueError("as the task says")
        return 1.0


class Blocker(TapeExecutor):
    """Blocks the event loop, as agents should not."""

    async def run(self, task: Row, client: RolloutClient) -> float:
        Path(task["started"]).touch()  # noqa: ASYNC240 - it is meant to
        time.sleep(60)  # noqa: ASYNC251
        return 0.0
