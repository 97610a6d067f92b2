"""An agent of one's own in OpenRLHF: `--train.agent_func_path executor/examples/openrlhf_agent.py`.

It is asked the question, and once more for the answer alone; both turns are trained on, and no NeMo Gym is started.
"""

from __future__ import annotations

from typing import Any

from tokentape_executor.executor import RolloutClient, Row, TapeExecutor
from tokentape_executor.openrlhf import AgentExecutor as TapeAgentExecutor


class SecondThought(TapeExecutor):
    """The reward is 1.0 where the last answer has the label."""

    async def run(self, task: Row, client: RolloutClient) -> float:
        """Talk to the policy, of which every token is recorded; return the reward."""
        messages: list[Any] = [*task["messages"]]
        for more in ("Now the answer alone.", None):
            reply = await client.chat.completions.create(model=client.model, messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            if more is not None:
                messages.append({"role": "user", "content": more})
        return float(str(task["answer"]) in str(messages[-1]["content"]))


class AgentExecutor(TapeAgentExecutor):
    """What OpenRLHF looks for."""

    agent = SecondThought
