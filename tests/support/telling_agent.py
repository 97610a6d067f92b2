"""An agent in a process that logs all that its libraries have to say, and that fails where its task says so."""

from __future__ import annotations

import logging

from tokentape_executor.executor import RolloutClient, Row, TapeExecutor

logging.basicConfig(level=logging.DEBUG)
_logger = logging.getLogger("telling")


class Telling(TapeExecutor):
    """Asks two questions in one conversation."""

    async def run(self, task: Row, client: RolloutClient) -> float:
        _logger.debug("%r %r %r %s", self, vars(self), client, task)
        messages: list[dict[str, str]] = [{"role": "user", "content": str(task["question"])}]
        for _ in range(2):
            reply = await client.chat.completions.create(model=client.model, messages=messages)  # pyright: ignore[reportArgumentType]
            messages += [
                {"role": "assistant", "content": reply.choices[0].message.content or ""},
                {"role": "user", "content": "Are you sure?"},
            ]
        if task["fails"]:
            await client.chat.completions.create(model="another", messages=messages)  # pyright: ignore[reportArgumentType]
        return 1.0
