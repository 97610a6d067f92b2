"""OpenRLHF's agent executor: the composition root, and a file for `--train.agent_func_path`.

OpenRLHF calls `AgentExecutor.execute` many times at once in the actor that has the engine. The first call starts, once:

1. a sidecar in this process, on the running event loop, around the actor's `AsyncLLM`;
2. a bridge and NeMo Gym, which all executors of a Ray job share on a node (`node/`), or joins those that run.

Any other agent takes NeMo Gym's place in a file of its own for `--train.agent_func_path`:

    from tokentape_executor.openrlhf import AgentExecutor as TapeAgentExecutor

    class AgentExecutor(TapeAgentExecutor):
        agent = Calculator  # a TapeExecutor

An executor can be pickled at any time; the copy holds nothing that runs, and starts anew. `shutdown` ends what this
executor started, and what is shared where it was the last to use it; so do the end of the interpreter and its death.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tokentape.channel import dial
from tokentape_executor._openrlhf_base import AgentExecutorBase
from tokentape_executor._openrlhf_services import (
    EmbeddedPolicy,
    Services,
    completed,
    node_group,
    shut_down_while_starting,
)
from tokentape_executor.errors import ImagesUnsupported, NothingSampled, PolicyUnavailable, StartFailed
from tokentape_executor.executor import RolloutLimits, TapeExecutor
from tokentape_executor.gym_executor import NemoGymExecutor
from tokentape_executor.markup import ChatMarkup, Prompt
from tokentape_executor.nemo_gym import GymAgents
from tokentape_executor.node import NodeMember, NodeSpec
from tokentape_executor.openrlhf_result import openrlhf_result
from tokentape_executor.policy import Policy
from tokentape_executor.prepare import prepare_data, task_of
from tokentape_executor.private_socket import PrivateSocket
from tokentape_executor.rollout import Row
from tokentape_executor.sampling_policy import sampling_policy
from tokentape_executor.settings import ExecutorSettings
from tokentape_executor.tape_client import TapeClient, TapeOptions

if TYPE_CHECKING:
    from tokentape_sidecar.engine import Engine

# No dataclass in this file: OpenRLHF executes it without entering it in sys.modules, where dataclasses look.

__all__ = ["AgentExecutor", "prepare_data"]

_STARTED = frozenset(
    {"_lock", "_markup", "_services", "sidecar_name", "sidecar_address", "policy_model_name", "policy_base_url"}
)
"""Attributes that belong to what runs, and so to this process."""


class AgentExecutor(AgentExecutorBase):
    """Runs rollouts for OpenRLHF and returns exactly what the engine was given and sampled.

    The three methods `_start_vllm_server`, `_wait_for_vllm_server` and `_start_nemogym_services` may be overridden, by
    plain functions or coroutines. They are called in this order, once per start, and communicate through the public
    attributes below.
    """

    agent: ClassVar[type[TapeExecutor] | None] = None
    """What runs rollouts; `None`: NeMo Gym's agents. With any other, no Gym is started."""

    sidecar_name: str = ""
    """Set by `_start_vllm_server`: the sidecar's name, the part of tape ids before the dot."""
    sidecar_address: str = ""
    """Set by `_start_vllm_server`: the sidecar's gRPC address, a Unix socket that only this user can reach."""
    policy_model_name: str = ""
    """Set by `_start_vllm_server`: what agents call the policy."""
    policy_base_url: str = ""
    """Set by `_wait_for_vllm_server`: the OpenAI base URL, with `/v1`, of the bridge; it changes when that restarts."""

    _settings: ExecutorSettings | None = None
    _lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
    """Held while services start, by callers on its event loop."""
    _markup: ChatMarkup | None = None
    _shutdowns: int = 0
    """How often it was shut down: who waits for a start while that happens starts no other."""
    _services: Services | None = None

    def __init__(self, settings: ExecutorSettings | None = None) -> None:
        """Take `settings`; `None`: those of the environment in which the first rollout runs."""
        self._settings = settings

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _STARTED}

    async def execute(  # noqa: PLR0917 - the signature is OpenRLHF's
        self,
        prompt: Any,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Run one rollout; see `openrlhf_result` for what it returns.

        `prompt` is a question, or messages, or one of these in the chat template's markup (`markup.py`); `label` is
        what `prepare` makes of it, for Gym's math the expected answer. `sampling_params` (vLLM's; only read) holds for
        every call of the rollout, `max_length` bounds prompt and completion together in each, in tokens.
        `hf_tokenizer` and `llm_engine` (OpenRLHF's actor, or an `AsyncLLM`) serve the first call's start.

        Raises `StartFailed`, after which the next call starts anew; `RolloutError`; `PromptRefused`;
        `ImagesUnsupported`.
        """
        if images is not None and not (isinstance(images, Sized) and len(images) == 0):
            raise ImagesUnsupported("this executor takes no images; leave `images` out of the data")
        self._markup = self._markup or ChatMarkup(getattr(hf_tokenizer, "tokenizer", hf_tokenizer))
        task = self.prepare(self._markup.unwrap(prompt), label, sampling_params)
        services = await self._started(llm_engine, hf_tokenizer)

        async def result_of(agent: TapeExecutor) -> dict[str, Any]:
            rollout = await agent.rollout(
                task,
                sampling_policy=sampling_policy(sampling_params),
                max_context_tokens=max_length,
                options=TapeOptions(keep_reasoning=services.settings.keep_reasoning),
                must_sample=True,
            )
            return openrlhf_result(rollout, prompt=prompt, label=label)

        assert services.rollouts is not None
        try:
            return await services.run(result_of(services.rollouts), _shut_down)
        except NothingSampled as error:
            raise NothingSampled(
                f"{error}; does the first prompt fit into OpenRLHF's max_length, {max_length}?"
            ) from error

    def prepare(self, prompt: Prompt, label: Any, sampling_params: Any) -> Row:
        """Return the agent's task: a row for NeMo Gym's math (`prepare_data`), for other agents `task_of`.

        `prompt` is a user's question, or a list of messages where there are others than that. May be overridden.
        """
        if self.agent is None:
            return prepare_data(prompt, label, sampling_params)
        return task_of(prompt, label)

    def make_agent(self, policy: Policy, gym: GymAgents | None) -> TapeExecutor:
        """Return what runs rollouts; called once per start. `gym` is `None` where `agent` is not. May be overridden."""
        settings = self._running_services().settings
        limits = RolloutLimits.from_settings(settings)
        retries, on_failure = settings.retries, settings.on_failure
        if self.agent is not None:
            return self.agent(policy, limits=limits, retries=retries, on_failure=on_failure)
        if gym is None:
            raise StartFailed("_start_nemogym_services started no NeMo Gym")
        return NemoGymExecutor(
            policy, gym, default_agent=settings.gym_agent, limits=limits, retries=retries, on_failure=on_failure
        )

    def shutdown(self) -> None:
        """End the sidecar, and leave the bridge and NeMo Gym: the last to leave ends them. Again does nothing.

        Returns in less than five seconds, from any thread, with the event loop running or gone. Called on the loop's
        own thread it closes what lives on the loop a moment later. Rollouts that run raise `PolicyUnavailable`, calls
        that start `StartFailed`. A later `execute` starts anew, on whichever event loop it runs.
        """
        self._shutdowns += 1
        services, self._services = self._services, None
        if services is not None:
            services.close()

    async def _start_vllm_server(self, llm_engine: Any, hf_tokenizer: Any) -> None:
        """Serve the engine: start the sidecar on this loop, and put it behind the node's bridge."""
        # Imported here, as is the adapter: nothing needs a sidecar before there is an engine.
        from tokentape_sidecar.listener import Listener  # noqa: PLC0415
        from tokentape_sidecar.server import Sidecar  # noqa: PLC0415

        services = self._running_services()
        # The sidecar packs the files when it starts, and has no more need of them.
        with tempfile.TemporaryDirectory(prefix="tokentape-") as directory:
            await asyncio.to_thread(hf_tokenizer.save_pretrained, directory)
            engine = self._attach(llm_engine, Path(directory))
            services.on_loop.push_async_callback(engine.close)
            socket = PrivateSocket()
            services.on_loop.callback(socket.remove)
            sidecar = await Sidecar.start(
                engine, data=Listener(socket.address), name=f"openrlhf-{secrets.token_hex(4)}"
            )
        services.on_loop.push_async_callback(sidecar.stop, grace_seconds=0.0)
        self.sidecar_name, self.sidecar_address = sidecar.name, sidecar.address
        self.policy_model_name = engine.model.name
        await self._join_node(services)

    def _attach(self, llm_engine: Any, tokenizer_directory: Path) -> Engine:
        """Return the adapter for the trainer's engine."""
        from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415

        return VllmEngine.attach(getattr(llm_engine, "llm", llm_engine), tokenizer_directory=tokenizer_directory)

    async def _join_node(self, services: Services) -> None:
        spec = NodeSpec.from_settings(
            services.settings,
            group=node_group(services.settings),
            policy_model_name=self.policy_model_name if self.agent is None else None,
        )
        services.join(await NodeMember.join(spec, {self.sidecar_name: self.sidecar_address}))

    async def _wait_for_vllm_server(self) -> bool:
        """Wait until the bridge serves; whether it does. Raises `StartFailed` with its log where it does not."""
        member = self._running_services().member
        if member is None:
            return False
        self.policy_base_url = await member.bridge_url()
        return True

    async def _start_nemogym_services(self, hf_tokenizer: Any) -> None:
        """Wait until the node's NeMo Gym, whose policy is the bridge, serves. Raises `StartFailed`."""
        del hf_tokenizer
        services = self._running_services()
        member, default_agent = services.member, services.settings.gym_agent
        if member is None:
            raise StartFailed("_start_vllm_server joined no node that could run NeMo Gym")
        agents = await member.gym_agents()
        if default_agent not in agents:
            raise StartFailed(f"TOKENTAPE_GYM_AGENT: NeMo Gym has no agent {default_agent!r}; it has {sorted(agents)}")
        services.gym = GymAgents(member.gym_agents)
        services.on_loop.push_async_callback(services.gym.close)

    def _running_services(self) -> Services:
        if self._services is None:
            raise shut_down_while_starting()
        return self._services

    async def _started(self, llm_engine: Any, hf_tokenizer: Any) -> Services:
        """Return what runs; the first of any number of concurrent callers starts it."""
        _refuse_other_loop(self._services)
        shutdowns = self._shutdowns
        async with self._lock_here():
            if self._shutdowns != shutdowns:
                raise shut_down_while_starting()
            services = self._services
            _refuse_other_loop(services)
            if services is None:
                services = self._services = Services(self, self._settings or ExecutorSettings.from_environment())
                try:
                    await services.run(self._start(services, llm_engine, hf_tokenizer), shut_down_while_starting)
                    self._running_services()
                except BaseException:
                    # Also when the one caller that starts is cancelled: the next one then starts anew.
                    if self._services is services:
                        self._services = None
                    await services.discard()
                    raise
            return services

    def _lock_here(self) -> asyncio.Lock:
        """Return the lock of the running loop; a lock serves the loop on which it was first waited for, and no other.

        Not replaced at `shutdown`: whoever comes next on the same loop waits until a start under way has ended.
        """
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock[0] is not loop:
            self._lock = (loop, asyncio.Lock())
        return self._lock[1]

    async def _start(self, services: Services, llm_engine: Any, hf_tokenizer: Any) -> None:
        await completed(self._start_vllm_server(llm_engine, hf_tokenizer))
        if not await completed(self._wait_for_vllm_server()):
            raise StartFailed("the policy's server is not ready")
        if self.agent is None:
            await completed(self._start_nemogym_services(hf_tokenizer))
        channel = dial(self.sidecar_address)
        services.on_loop.push_async_callback(channel.close)
        tapes = TapeClient(channel, self.sidecar_name, time_to_live_seconds=services.settings.tape_time_to_live_seconds)
        services.policy = EmbeddedPolicy(tapes, self.policy_model_name, self._bridge_url)
        services.rollouts = self.make_agent(services.policy, services.gym)

    async def _bridge_url(self) -> str:
        """Return where the bridge serves now."""
        services = self._services
        if services is not None and services.member is not None:
            self.policy_base_url = await services.member.bridge_url()
        return self.policy_base_url


def _shut_down() -> PolicyUnavailable:
    return PolicyUnavailable("the executor was shut down while the rollout ran")


def _refuse_other_loop(services: Services | None) -> None:
    """Raise `StartFailed` where `services` live on another event loop than the running one."""
    if services is not None and services.loop is not asyncio.get_running_loop():
        raise StartFailed("this executor runs on another event loop; call shutdown() before using it on this one")
