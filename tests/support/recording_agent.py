"""An agent file for `--train.agent_func_path`: NeMo Gym's math, keeping each rollout's trajectory for the test."""

from __future__ import annotations

from typing import Any

from tokentape_executor.gym_executor import NemoGymExecutor
from tokentape_executor.nemo_gym import GymAgents
from tokentape_executor.openrlhf import AgentExecutor as TapeAgentExecutor
from tokentape_executor.policy import Policy
from tokentape_executor.rollout import Rollout
from tokentape_executor.settings import GYM_AGENT, ExecutorSettings
from tokentape_executor.trajectory import Trajectory


class RecordingExecutor(NemoGymExecutor):
    """Keeps what each rollout left."""

    trajectories: list[Trajectory]

    async def rollout(self, *args: Any, **options: Any) -> Rollout:
        rollout = await super().rollout(*args, **options)
        self.trajectories.append(rollout.trajectory)
        return rollout


class AgentExecutor(TapeAgentExecutor):
    def __init__(self, settings: ExecutorSettings | None = None) -> None:
        super().__init__(settings)
        self.trajectories: list[Trajectory] = []

    def make_agent(self, policy: Policy, gym: GymAgents | None) -> RecordingExecutor:
        assert gym is not None
        agent = RecordingExecutor(policy, gym, default_agent=GYM_AGENT)
        agent.trajectories = self.trajectories
        return agent
