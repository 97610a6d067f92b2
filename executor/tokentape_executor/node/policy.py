"""The policy that a node's bridge serves."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokentape_executor.node.member import NodeMember
from tokentape_executor.rollout_client import NO_KEY
from tokentape_executor.tape_client import TapeClient


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """See `policy.Policy`."""

    tapes: TapeClient
    model_name: str
    member: NodeMember
    """Has joined with the sidecar of `tapes`."""
    api_key: str = field(default=NO_KEY, init=False)
    """A node's bridge asks for none."""

    async def bridge_url(self) -> str:
        """Return the URL of the node's bridge; see `NodeMember.bridge_url`."""
        return await self.member.bridge_url()
