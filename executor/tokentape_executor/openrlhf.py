"""OpenRLHF's agent executor on NeMo Gym: the composition root, and a file for `--train.agent_func_path`.

OpenRLHF calls `AgentExecutor.execute` many times at once in the actor that has the engine. The first call starts, once:

1. a sidecar in this process, on the running event loop, around the actor's `AsyncLLM`;
2. a bridge, as a process of its own;
3. NeMo Gym, as processes of their own, whose policy is the bridge.

Before that an executor holds nothing but its settings, and can be pickled. `shutdown` ends all of it; so do the end of
the interpreter and, for the processes, the death of this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import weakref
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

from tokentape.channel import dial
from tokentape.process import ListenAddress
from tokentape_executor._openrlhf_base import AgentExecutorBase
from tokentape_executor.errors import ImagesUnsupported, StartFailed
from tokentape_executor.executor import NemoGymExecutor
from tokentape_executor.nemo_gym import NemoGym
from tokentape_executor.openrlhf_result import openrlhf_result
from tokentape_executor.prepare import prepare_data
from tokentape_executor.sampling_policy import sampling_policy
from tokentape_executor.services import Bridge, ServiceGroup
from tokentape_executor.settings import ExecutorSettings
from tokentape_executor.tape_client import TapeClient

# No dataclass in this file: OpenRLHF executes it without entering it in sys.modules, where dataclasses look.

__all__ = ["AgentExecutor", "prepare_data"]

_T = TypeVar("_T")

_CLOSE_SECONDS = 1.5


class _Services:
    """Everything that one executor has started."""

    def __init__(self, owner: AgentExecutor, settings: ExecutorSettings) -> None:
        """Start nothing yet. What will run in other processes ends with `owner` at the latest."""
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.group = ServiceGroup(settings.log_directory)
        """What runs in other processes; to be stopped from any thread."""
        self.on_loop = contextlib.AsyncExitStack()
        """What lives on the event loop; to be closed there."""
        self.bridge: Bridge | None = None
        self.gym: NemoGym | None = None
        self.rollouts: NemoGymExecutor | None = None
        self._finalizer = weakref.finalize(owner, self.group.stop)

    def stop(self) -> None:
        """Stop what runs in other processes; blocks until it has ended. From any thread; again does nothing."""
        self.group.stop()
        self._finalizer.detach()


class AgentExecutor(AgentExecutorBase):
    """Runs NeMo Gym rollouts for OpenRLHF and returns exactly what the engine was given and sampled.

    The three methods `_start_vllm_server`, `_wait_for_vllm_server` and `_start_nemogym_services` may be overridden, by
    plain functions or coroutines. They are called in this order, once per start, and communicate through the public
    attributes below.
    """

    sidecar_name: str = ""
    """Set by `_start_vllm_server`: the sidecar's name, the part of tape ids before the dot."""
    sidecar_address: str = ""
    """Set by `_start_vllm_server`: the sidecar's gRPC address."""
    policy_model_name: str = ""
    """Set by `_start_vllm_server`: what Gym calls the policy."""
    policy_base_url: str = ""
    """Set by `_wait_for_vllm_server`: the OpenAI base URL, with `/v1`, that Gym calls."""

    def __init__(self, settings: ExecutorSettings | None = None) -> None:
        """Take `settings`; `None`: those of the environment in which the first rollout runs."""
        self._settings = settings
        self._lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        """Held while services start, by callers on its event loop."""
        self._services: _Services | None = None

    async def execute(  # noqa: PLR0917 - the signature is OpenRLHF's
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Run one rollout of the question `prompt`, whose answer is `label`; see `openrlhf_result` for what it returns.

        `sampling_params` (vLLM's; only read) holds for every call of the rollout, `max_length` bounds prompt and
        completion together in each, in tokens. `hf_tokenizer` and `llm_engine` (OpenRLHF's actor, or an `AsyncLLM`)
        serve the first call's start. Raises `StartFailed`, after which the next call starts anew; `RolloutError`;
        `ImagesUnsupported`.
        """
        if images is not None:
            raise ImagesUnsupported("this executor takes no images; leave `images` out")
        rollouts = await self._started(llm_engine, hf_tokenizer)
        rollout = await rollouts.rollout(
            prepare_data(prompt, label, sampling_params),
            sampling_policy=sampling_policy(sampling_params),
            max_context_tokens=max_length,
        )
        return openrlhf_result(rollout, prompt=prompt, label=label)

    def shutdown(self) -> None:
        """End the sidecar, the bridge and NeMo Gym. Returns in less than five seconds; again does nothing.

        From any thread, with the event loop running or gone. Called on the loop's own thread it closes what lives on
        the loop a moment later. A later `execute` starts anew, on whichever event loop it runs; one that is starting
        raises `StartFailed`.
        """
        services, self._services = self._services, None
        if services is None:
            return
        services.stop()
        _close_on_loop(services)

    async def _start_vllm_server(self, llm_engine: Any, hf_tokenizer: Any) -> None:
        """Serve the engine: start the sidecar on this loop and launch the bridge."""
        # Imported here: the adapter imports vLLM, which nothing needs before there is an engine.
        from tokentape_sidecar.server import Sidecar  # noqa: PLC0415
        from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415

        services = self._running_services()
        tokenizer_directory = services.group.directory / "tokenizer"
        await asyncio.to_thread(hf_tokenizer.save_pretrained, tokenizer_directory)
        engine = VllmEngine.attach(getattr(llm_engine, "llm", llm_engine), tokenizer_directory=tokenizer_directory)
        services.on_loop.push_async_callback(engine.close)
        sidecar = await Sidecar.start(
            engine, listen=ListenAddress("127.0.0.1", 0), name=f"openrlhf-{secrets.token_hex(4)}"
        )
        services.on_loop.push_async_callback(sidecar.stop, grace_seconds=0.0)
        self.sidecar_name, self.sidecar_address = sidecar.name, sidecar.address
        self.policy_model_name = engine.model.name
        services.bridge = Bridge.launch({sidecar.name: sidecar.address}, services.group, services.settings)

    async def _wait_for_vllm_server(self) -> bool:
        """Wait until the bridge serves; whether it does. Raises `StartFailed` with its log where it does not."""
        bridge = self._running_services().bridge
        if bridge is None:
            return False
        self.policy_base_url = await bridge.wait_ready()
        return True

    async def _start_nemogym_services(self, hf_tokenizer: Any) -> None:
        """Start NeMo Gym with the bridge as its policy."""
        del hf_tokenizer
        services = self._running_services()
        settings = services.settings
        services.gym = await NemoGym.start(
            venv=settings.gym_venv,
            configs=settings.gym_configs,
            overrides=settings.gym_overrides,
            default_agent=settings.gym_agent,
            policy_base_url=self.policy_base_url,
            policy_model_name=self.policy_model_name,
            log_file=services.group.log_file("nemo_gym"),
            timeout_seconds=settings.start_timeout_seconds,
        )
        services.on_loop.push_async_callback(services.gym.close)
        # In a thread: it stops Gym, which takes a while, where `shutdown` came first.
        await asyncio.to_thread(services.group.add, services.gym)

    def _running_services(self) -> _Services:
        if self._services is None:
            raise _shut_down()
        return self._services

    async def _started(self, llm_engine: Any, hf_tokenizer: Any) -> NemoGymExecutor:
        """Return what runs rollouts; the first of any number of concurrent callers starts it."""
        _refuse_other_loop(self._services)
        async with self._lock_here():
            services = self._services
            _refuse_other_loop(services)
            if services is None:
                services = self._services = _Services(self, self._settings or ExecutorSettings.from_environment())
                try:
                    await self._start(services, llm_engine, hf_tokenizer)
                    if self._services is not services:
                        raise _shut_down()
                except BaseException:
                    # Also when the one caller that starts is cancelled: the next one then starts anew.
                    if self._services is services:
                        self._services = None
                    await asyncio.to_thread(services.stop)
                    await services.on_loop.aclose()
                    raise
            assert services.rollouts is not None
            return services.rollouts

    def _lock_here(self) -> asyncio.Lock:
        """Return the lock of the running loop; a lock serves the loop on which it was first waited for, and no other.

        Not replaced at `shutdown`: whoever comes next on the same loop waits until a start under way has ended.
        """
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock[0] is not loop:
            self._lock = (loop, asyncio.Lock())
        return self._lock[1]

    async def _start(self, services: _Services, llm_engine: Any, hf_tokenizer: Any) -> None:
        await _completed(self._start_vllm_server(llm_engine, hf_tokenizer))
        if not await _completed(self._wait_for_vllm_server()):
            raise StartFailed("the policy's server is not ready")
        await _completed(self._start_nemogym_services(hf_tokenizer))
        if services.gym is None:
            raise StartFailed("_start_nemogym_services started no NeMo Gym")
        channel = dial(self.sidecar_address)
        services.on_loop.push_async_callback(channel.close)
        services.rollouts = NemoGymExecutor(
            TapeClient(channel, self.sidecar_name, time_to_live_seconds=services.settings.tape_time_to_live_seconds),
            services.gym,
            timeout_seconds=services.settings.rollout_timeout_seconds,
        )


def _shut_down() -> StartFailed:
    return StartFailed("the executor was shut down while it started")


def _refuse_other_loop(services: _Services | None) -> None:
    """Raise `StartFailed` where `services` live on another event loop than the running one."""
    if services is not None and services.loop is not asyncio.get_running_loop():
        raise StartFailed("this executor runs on another event loop; call shutdown() before using it on this one")


async def _completed(result: _T | Awaitable[_T]) -> _T:
    """Return what an overridable method returned, awaited if it was a coroutine."""
    return await cast("Awaitable[_T]", result) if inspect.isawaitable(result) else cast("_T", result)


def _close_on_loop(services: _Services) -> None:
    """Close what lives on the event loop, as far as that loop still lives."""
    loop = services.loop
    if loop.is_closed():
        return
    closing = services.on_loop.aclose()
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    if here is loop:
        _closings.add(task := loop.create_task(closing))
        task.add_done_callback(_closings.discard)
    elif loop.is_running():
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(closing, loop).result(_CLOSE_SECONDS)
    else:
        loop.run_until_complete(closing)


_closings: set[asyncio.Task[None]] = set()
"""Owns the closings that `shutdown` has left to their loops."""
