"""Rollouts by NeMo Gym's agents."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from tokentape_executor.errors import RewardInvalid
from tokentape_executor.executor import NO_LIMITS, OnFailure, RolloutClient, RolloutLimits, TapeExecutor
from tokentape_executor.policy import Policy
from tokentape_executor.rollout import Outcome, Row

if TYPE_CHECKING:
    from tokentape_executor.nemo_gym import GymAgents


class NemoGymExecutor(TapeExecutor):
    """Rollouts by NeMo Gym's agents. A task is a row: `responses_create_params`, and what its verifier wants beside it.

    Gym's model server must send its calls to the policy's bridge; each row tells it which tape they are for.
    """

    def __init__(
        self,
        policy: Policy,
        gym: GymAgents,
        *,
        default_agent: str | None = None,
        limits: RolloutLimits = NO_LIMITS,
        retries: int = 0,
        on_failure: OnFailure = OnFailure.RAISE,
    ) -> None:
        """`default_agent` runs the rows that name none in `agent_ref`; the rest is as in `TapeExecutor`."""
        super().__init__(policy, limits=limits, retries=retries, on_failure=on_failure)
        self._gym = gym
        self._default_agent = default_agent

    async def run(self, task: Row, client: RolloutClient) -> Outcome:
        """Post the row, tagged with the tape's id, to its agent. Raises `RewardInvalid` where no reward comes back."""
        report = await self._gym.run(self._with_agent(tag_row(task, client.tape_id)))
        if "reward" not in report:
            raise RewardInvalid(f"NeMo Gym returned no reward, only {reprlib.repr(sorted(report))}")
        response = report.get("response")
        details = cast("dict[str, Any]", response).get("incomplete_details") if isinstance(response, dict) else None
        return Outcome(report["reward"], details is not None, report)

    def _with_agent(self, row: dict[str, Any]) -> dict[str, Any]:
        if self._default_agent is None or row.get("agent_ref"):
            return row
        return {**row, "agent_ref": {"type": "responses_api_agents", "name": self._default_agent}}


def tag_row(row: Row, tape_id: str) -> dict[str, Any]:
    """Return a copy of `row` whose model calls carry `tape_id`: metadata is what Gym passes through to the bridge."""
    params = cast("Mapping[str, Any]", row.get("responses_create_params") or {})
    metadata = cast("Mapping[str, str]", params.get("metadata") or {})
    return {**row, "responses_create_params": {**params, "metadata": {**metadata, "tape_id": tape_id}}}
