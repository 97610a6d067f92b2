"""What the executors of one group share."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

from tokentape.access import OPEN, Access
from tokentape_executor.errors import StartFailed
from tokentape_executor.settings import ExecutorSettings

_NOT_ON_A_NODE = ("--api-key-file", "--tls-")


@dataclass(frozen=True, slots=True)
class GymSpec:
    """A NeMo Gym to be started."""

    venv: Path
    """Virtual environment with nemo-gym 0.4 or newer."""
    configs: tuple[str, ...]
    """Its configuration files, absolute or relative to its installation."""
    overrides: tuple[str, ...]
    """What they shall say otherwise (Hydra's `++KEY.KEY=VALUE`)."""
    policy_model_name: str
    """What it calls the policy."""


@dataclass(frozen=True, slots=True)
class AttachedGym:
    """A NeMo Gym that somebody else runs."""

    url: str
    """`http://HOST:PORT` of its head server."""
    policy_model_name: str
    """What the sidecars call the policy; Gym must call it the same."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What is shared. Executors of one user whose specs (and Pythons) are equal share one."""

    group: str
    """Tells apart what would else be shared."""
    bridge_options: tuple[str, ...]
    """More options of `tokentape-bridge`."""
    gym: GymSpec | AttachedGym | None
    """`None`: a bridge alone."""
    log_directory: Path | None
    """Where `bridge.log`, `nemo_gym.log` and the keeper's `node.log` go, to stay. `None`: they go with the keeper."""
    start_timeout_seconds: float
    """How long each process may take to be ready."""
    access: Access = OPEN
    """How the bridge gets into the sidecars: names of files, no secret."""

    @classmethod
    def from_settings(
        cls, settings: ExecutorSettings, *, group: str, policy_model_name: str | None, access: Access = OPEN
    ) -> Self:
        """Return what `settings` say. `policy_model_name` is what Gym shall call the policy; `None`: no Gym.

        `access` gets the bridge into the sidecars. Raises `StartFailed` where the settings have the bridge ask for keys
        or speak TLS, which nobody of the node would.
        """
        for option in settings.bridge_options:
            if option.startswith(_NOT_ON_A_NODE):
                raise StartFailed(
                    f"TOKENTAPE_BRIDGE_OPTIONS: {option.partition('=')[0]}: a node's bridge asks for no key and speaks "
                    "no TLS; start one by hand, and give open_policy (or tokentape-rollout) its URL and key"
                )
        gym: GymSpec | AttachedGym | None = None
        if policy_model_name is not None and settings.gym_url is not None:
            gym = AttachedGym(settings.gym_url, policy_model_name)
        elif policy_model_name is not None:
            gym = GymSpec(settings.gym_venv.absolute(), settings.gym_configs, settings.gym_overrides, policy_model_name)
        return cls(
            group=group,
            bridge_options=settings.bridge_options,
            gym=gym,
            log_directory=None if settings.log_directory is None else settings.log_directory.absolute(),
            start_timeout_seconds=settings.start_timeout_seconds,
            access=access.absolute(),
        )

    def to_json(self) -> bytes:
        """Return the spec as the keeper gets it."""
        return _ADAPTER.dump_json(self)

    @staticmethod
    def from_json(text: bytes) -> NodeSpec:
        """Return what `to_json` gave. Raises pydantic's `ValidationError`."""
        return _ADAPTER.validate_json(text)

    @property
    def key(self) -> str:
        """16 hex digits, the same for what is to be shared, and only for that."""
        return hashlib.sha256(self.to_json() + sys.prefix.encode()).hexdigest()[:16]


_ADAPTER = TypeAdapter(NodeSpec)
