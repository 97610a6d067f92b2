"""OpenRLHF's base class for agent executors, or one like it where OpenRLHF is not installed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any


class _AgentExecutorBase(ABC):
    """The same interface as `openrlhf.utils.agent.AgentExecutorBase` (0.11.2)."""

    @abstractmethod
    async def execute(  # noqa: PLR0917 - the signature is OpenRLHF's
        self,
        prompt: Any,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> Any:
        """Run one rollout."""
        raise NotImplementedError


if TYPE_CHECKING:
    AgentExecutorBase = _AgentExecutorBase
else:
    try:
        from openrlhf.utils.agent import AgentExecutorBase
    except ImportError:
        AgentExecutorBase = _AgentExecutorBase
