"""A calculator agent: the model may have a term computed before it answers.

    python executor/examples/calculator.py --sidecar 127.0.0.1:50051 [--bridge http://127.0.0.1:8000/v1]

A line `compute: 2 * (3 + 4)` in the model's answer is computed, and the result told; anything else is its answer. Plain
text, so that models without tool calls can do it.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import operator
import re
from collections.abc import Callable
from typing import Any

from tokentape_executor.executor import FailedRollout, RolloutClient, RolloutLimits, Row, TapeExecutor
from tokentape_executor.served_policy import open_policy

ASK = "Answer with the number alone. To have a term computed first, write one line like: compute: 2 * (3 + 4)"
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator(TapeExecutor):
    """A task has `question` and `expected_answer`, as in `questions.jsonl`.

    The reward is 1.0 where the model's last number is the answer.
    """

    async def run(self, task: Row, client: RolloutClient) -> float:
        """Ask, and compute, until there is an answer; return the reward."""
        messages: list[Any] = [{"role": "user", "content": f"{ASK}\n\n{task['question']}"}]
        text = ""
        for _ in range(4):
            reply = await client.chat.completions.create(model=client.model, messages=messages, max_tokens=128)
            text = reply.choices[0].message.content or ""
            wanted = re.search(r"compute:(.*)", text)
            if wanted is None:
                break
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": compute(wanted[1])}]
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        return float(bool(numbers) and float(numbers[-1]) == float(task["expected_answer"]))


def compute(term: str) -> str:
    """Return the value of a term of numbers, + - * / and parentheses; what is wrong with it where it has none."""
    try:
        return str(_value(ast.parse(term.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        return f"That cannot be computed: {error}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(left), _value(right))
        case _:
            raise ValueError("only numbers, + - * / and parentheses")


async def main() -> None:
    """Run three questions, and show what there is to train on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sidecar", required=True, metavar="HOST:PORT")
    parser.add_argument("--bridge", metavar="URL", help="a bridge that serves it; without, one is started")
    options = parser.parse_args()
    questions = [("What is 2 + 3?", 5), ("What is 12 * 12?", 144), ("What is 7 * (8 - 2)?", 42)]
    async with open_policy(options.sidecar, bridge=options.bridge) as policy:
        calculator = Calculator(policy, limits=RolloutLimits(turn_seconds=60))
        tasks = [{"question": question, "expected_answer": answer} for question, answer in questions]
        for task, rollout in zip(tasks, await calculator.rollouts(tasks), strict=True):
            if isinstance(rollout, FailedRollout):
                print(task["question"], "failed:", rollout.error)  # noqa: T201
                continue
            for sample in rollout.trajectory.samples:
                print(task["question"], "reward", rollout.outcome.reward, "sampled", sample.action_ranges)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
