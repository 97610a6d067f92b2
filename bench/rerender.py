"""What a rollout of several turns costs a trainer, and what of it is true, by three ways to get its samples.

    python -m bench.rerender [--model .cache/SmolLM2-135M-Instruct] [--logs out/logs]

Eight rollouts of three required tool calls each (NeMo Gym's example_single_tool_call and example_multi_step; a bounded
schema for each tool) run at once on real vLLM, twice:

- continued: as tokentape does it, each call a continuation of the one before;
- not continued: the same with the bridge's `--no-continuation`, as with any server that renders every request anew;
- re-rendered: the continued run as a trainer without token ids gets it: the conversation that Gym reports, rendered
  with the chat template and tokenised, and what the template writes for the assistant taken for sampled.

The chat template writes tool calls as Hermes and Qwen do; SmolLM2's own would leave them out, and a re-render would
then have none of the sampled tokens. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.tables import table
from tests.support import tool_rollouts
from tests.support.rerender import Drift, compare, conversation, repeated, rerender

from tokentape.channel import dial
from tokentape_executor.gym_executor import NemoGymExecutor
from tokentape_executor.nemo_gym import GymAgents
from tokentape_executor.node import NodeMember, NodePolicy, NodeSpec
from tokentape_executor.processes import ChildProcess
from tokentape_executor.rollout import Rollout
from tokentape_executor.services import ServiceGroup
from tokentape_executor.settings import ExecutorSettings
from tokentape_executor.tape_client import TapeClient

_SIDECAR, _MODEL = "main", "smol"
_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, slots=True)
class Column:
    """One way to get samples; counts of tokens, but for the first."""

    samples: int
    sampled: int
    tokens: int
    again: int
    missing: int = 0
    misplaced: int = 0
    invented: int = 0

    @classmethod
    def of_tapes(cls, rollouts: Sequence[Rollout]) -> Column:
        """Count what came from tapes, which the assembler has proved complete and in place."""
        trajectories = [rollout.trajectory for rollout in rollouts]
        samples = [sample for trajectory in trajectories for sample in trajectory.samples]
        return cls(
            samples=len(samples),
            sampled=sum(trajectory.receipt.sampled for trajectory in trajectories),
            tokens=sum(len(sample.tokens) for sample in samples),
            again=sum(repeated(trajectory.samples) for trajectory in trajectories),
            missing=sum(trajectory.receipt.dropped_total for trajectory in trajectories),
        )

    @classmethod
    def of_drifts(cls, drifts: Sequence[Drift]) -> Column:
        """Count what re-renders have, one sample for each."""
        return cls(
            samples=len(drifts),
            sampled=sum(drift.sampled for drift in drifts),
            tokens=sum(drift.tokens for drift in drifts),
            again=0,
            missing=sum(drift.missing for drift in drifts),
            misplaced=sum(drift.misplaced for drift in drifts),
            invented=sum(drift.invented for drift in drifts),
        )


async def start_sidecar(model: Path, group: ServiceGroup, settings: ExecutorSettings) -> str:
    """Start vLLM with its sidecar; return the address."""
    ready_file = group.directory / "sidecar.ready"
    process = ChildProcess.start(
        "sidecar",
        [
            *(sys.executable, "-P", "-c", "from tokentape.console import sidecar; sidecar()"),
            *("--model", str(model), "--served-model-name", _MODEL, "--name", _SIDECAR),
            *("--listen", "127.0.0.1:0", "--ready-file", str(ready_file), "--grace-seconds", "1", "--"),
            *("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", str(tool_rollouts.MAX_CONTEXT_TOKENS)),
        ],
        log_file=group.log_file("sidecar"),
        environment={**os.environ, **_ENVIRONMENT},
    )
    group.add(process)
    return await process.wait_for_ready_file(ready_file, timeout_seconds=settings.start_timeout_seconds)


async def run(address: str, settings: ExecutorSettings, *bridge_options: str) -> list[Rollout]:
    """Run the eight rollouts through a bridge and a Gym of their own."""
    settings = replace(settings, bridge_options=bridge_options)
    spec = NodeSpec.from_settings(settings, group=f"bench {secrets.token_hex(8)}", policy_model_name=_MODEL)
    member = await NodeMember.join(spec, {_SIDECAR: address})
    gym = GymAgents(member.gym_agents)
    try:
        async with dial(address) as channel:
            executor = NemoGymExecutor(NodePolicy(TapeClient(channel, _SIDECAR), _MODEL, member), gym)
            rows = tool_rollouts.rows(settings.gym_venv)
            return list(await asyncio.gather(*(executor.rollout(row) for row in rows)))
    finally:
        await gym.close()
        await asyncio.to_thread(member.leave)


def rerendered(rollouts: Sequence[Rollout], model: Path) -> list[Drift]:
    """Render each rollout's conversation anew and compare it with its sample."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

    tokenizers: Any = AutoTokenizer
    tokenizer = tokenizers.from_pretrained(str(model))
    drifts: list[Drift] = []
    for rollout in rollouts:
        (sample,) = rollout.trajectory.samples
        again = rerender(tokenizer, *conversation(rollout.outcome.report))
        prompt_end, _ = sample.action_ranges[0]
        assert again.token_ids[:prompt_end] == sample.tokens[:prompt_end], "another prompt is no comparison"
        drifts.append(compare(sample, again))
    return drifts


def compared(continued: Column, off: Column, again: Column) -> str:
    """Return the comparison in Markdown."""
    columns = (continued, off, again)
    rows = {
        "samples": [column.samples for column in columns],
        "tokens that were sampled": [column.sampled for column in columns],
        "tokens to train on, context included": [column.tokens for column in columns],
        "… of these in an earlier sample already": [column.again for column in columns],
        "sampled tokens in their true place": [
            column.sampled - column.missing - column.misplaced for column in columns
        ],
        "sampled tokens after another context than the engine's": [column.misplaced for column in columns],
        "sampled tokens that are missing": [column.missing for column in columns],
        "tokens trained on that were never sampled": [column.invented for column in columns],
    }
    cells = [[name, *(f"{value:,}" for value in values)] for name, values in rows.items()]
    return table(["", "tokentape", "continuation off", "re-rendered"], cells)


async def bench(model_directory: Path, logs: Path) -> None:
    """Run everything and print the table."""
    settings = replace(
        ExecutorSettings.from_environment(),
        gym_configs=tool_rollouts.GYM_CONFIGS,
        gym_overrides=tool_rollouts.GYM_OVERRIDES,
        gym_agent=tool_rollouts.GYM_AGENT,
        log_directory=logs,
    )
    group = ServiceGroup(logs)
    with tempfile.TemporaryDirectory() as scratch:
        model = tool_rollouts.model_with_tools(model_directory, Path(scratch))
        try:
            address = await start_sidecar(model, group, settings)
            continued = await run(address, settings)
            off = await run(address, settings, "--no-continuation")
        finally:
            await asyncio.to_thread(group.stop)
        drifts = rerendered(continued, model)
    for name, rollouts in (("continued", continued), ("not continued", off)):
        calls = sum(rollout.trajectory.receipt.calls for rollout in rollouts)
        print(f"{name}: {len(rollouts)} rollouts, {calls} calls")
    print(
        f"re-renders that differ from what was sampled: {sum(not drift.exact for drift in drifts)} of {len(drifts)}\n"
    )
    print(compared(Column.of_tapes(continued), Column.of_tapes(off), Column.of_drifts(drifts)))


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rerender", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path(".cache/SmolLM2-135M-Instruct"), metavar="DIR")
    parser.add_argument("--logs", type=Path, default=Path("out/logs"), metavar="DIR", help="where the logs go")
    options = parser.parse_args()
    asyncio.run(bench(options.model, options.logs))


if __name__ == "__main__":
    main()
