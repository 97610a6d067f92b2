"""What the executors of one group on one machine share: a bridge, and NeMo Gym.

They are kept by a process of their own, the *keeper* (`keeper.py`), which belongs to none of the executors. An executor
is a *member* (`member.py`): it holds a connection to the keeper for as long as it needs the two.

- Whoever joins first starts the keeper; a file lock makes sure that nobody starts a second one.
- A member's sidecars are in the bridge's table from its joining to its leaving. A member that dies has left.
- The keeper restarts what dies or hangs. If the keeper itself dies, bridge and Gym end, and the members start another.
- The last member that leaves ends it all, and so does nobody's coming.
"""

from tokentape_executor.node.member import NodeMember
from tokentape_executor.node.policy import NodePolicy
from tokentape_executor.node.spec import AttachedGym, GymSpec, NodeSpec

__all__ = ["AttachedGym", "GymSpec", "NodeMember", "NodePolicy", "NodeSpec"]
