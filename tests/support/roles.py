"""What the processes of a node are, by their command lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

ROLES: Mapping[str, Callable[[str], bool]] = {
    "bridge": lambda line: "console import bridge" in line,
    "sidecar": lambda line: "console import sidecar" in line,
    "keeper": lambda line: "tokentape_executor.node.keeper" in line,
    "gym": lambda line: "/bin/gym env start" in line,
    "gym server": lambda line: line.endswith("python app.py"),
}
"""Their leashes, which have the same in their command lines, and what Ray starts have none."""

GYM_SERVERS = Counter({"gym server": 3})
"""What Gym starts for one agent: the agent, its resources and its model."""
NODE = Counter({"keeper": 1, "bridge": 1, "gym": 1}) + GYM_SERVERS
"""A node with a Gym for one agent."""


def is_a(role: str, line: str) -> bool:
    """Whether the process with this command line, its words joined by spaces, has the role."""
    return ROLES[role](line) and "_leash.py" not in line


def roles_of(lines: Iterable[str]) -> Counter[str]:
    """How many of these command lines are of each role."""
    return Counter(role for line in lines for role in ROLES if is_a(role, line))
