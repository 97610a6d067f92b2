"""An agent with a sub-agent: two conversations on one tape, and what a trainer gets of them.

    python executor/examples/sub_agent.py --sidecar 127.0.0.1:50051 [--bridge http://127.0.0.1:8000/v1]

The main agent has a helper write a hint, answers with it, and is asked once more. Both are the same model; the helper's
conversation has its own history, so that it becomes a sample of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from tokentape_executor.executor import Rollout, RolloutClient, RolloutLimits, Row, TapeExecutor
from tokentape_executor.served_policy import open_policy


class WithHelper(TapeExecutor):
    """A task has `question` and `answer`; the reward is 1.0 where the main agent's last words have the answer."""

    async def run(self, task: Row, client: RolloutClient) -> float:
        """Have the helper write a hint, then answer twice; return the reward."""
        hint = await say(client, [], f"Give a short hint, but not the answer: {task['question']}")
        main: list[Any] = []
        await say(client, main, f"{task['question']}\nA hint: {hint}")
        final = await say(client, main, "Now the answer alone.")
        return float(str(task["answer"]) in final)


async def say(client: RolloutClient, conversation: list[Any], text: str) -> str:
    """Say the next thing in a conversation; return the model's answer, which goes into it too."""
    conversation.append({"role": "user", "content": text})
    reply = await client.chat.completions.create(model=client.model, messages=conversation, max_tokens=64)
    answer = reply.choices[0].message.content or ""
    conversation.append({"role": "assistant", "content": answer})
    return answer


def show(rollout: Rollout) -> str:
    """Return what a trainer gets: the samples, and the account of every sampled token."""
    lines = [f"reward {rollout.outcome.reward}, for all of these samples:"]
    for index, sample in enumerate(rollout.trajectory.samples):
        begins = f"  sample {index} ({sample.split_cause.value})"
        lines.append(f"{begins}: {len(sample.tokens)} tokens, sampled {sample.action_ranges}")
    return "\n".join([*lines, f"receipt: {json.dumps(rollout.trajectory.receipt.as_dict())}"])


async def main() -> None:
    """Run one question, and show what there is to train on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sidecar", required=True, metavar="HOST:PORT")
    parser.add_argument("--bridge", metavar="URL", help="a bridge that serves it; without, one is started")
    options = parser.parse_args()
    async with open_policy(options.sidecar, bridge=options.bridge) as policy:
        agent = WithHelper(policy, limits=RolloutLimits(turn_seconds=60))
        rollout = await agent.rollout({"question": "What is the capital of France?", "answer": "Paris"})
    print(show(rollout))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
