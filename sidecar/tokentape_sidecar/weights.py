"""Which weights sample the next token, learnt from what is done to the engine.

vLLM 0.32 and later stamp their outputs with a version, but only if somebody names one; earlier ones stamp nothing, and
a trainer that drives the engine itself (OpenRLHF) names none. So the engine object's own methods are watched: the first
call that changes weights opens an update, and the next output closes it. A version is the name that the engine stamps,
if any, and the number of unnamed updates since.

Where the new version's tokens begin is certain if generation was paused around the update. And what was computed before
an update stays in the engine's cache unless that is cleared: tokens sampled on a kept cache belong to neither version.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from typing import Any

from tokentape_sidecar.engine import Weights

# The workers' methods that change weights, in vLLM (reload_weights, update_weights, start_weight_update) and in
# trainers' own worker extensions (OpenRLHF: update_weight, update_weight_cuda_ipc).
_CHANGES_WEIGHTS = re.compile(r"(?:^|_)(?:update|load|reload|set|start|finish)_(?:\w+_)?weights?(?:_|$)")

# What vLLM calls weights that nobody has named.
_UNNAMED = "default"


class CallWeights:
    """The weights as one call meets them; made when the call starts."""

    __slots__ = ("_born", "_born_stale", "_observer")

    def __init__(self, observer: WeightObserver) -> None:
        self._observer = observer
        self._born = observer.clock
        self._born_stale = observer.prefix_is_stale

    def of_step(self, stamp: str | None) -> Weights:
        """Return the weights that sampled a step which the engine stamped with `stamp` (`None`: with nothing)."""
        observer = self._observer
        observer.note_step(stamp)
        running_stale = observer.stale_update > max(self._born, observer.cleared)
        prefix_stale = self._born_stale and observer.cleared <= self._born
        return observer.weights(
            boundary_uncertain=observer.uncertain_update > self._born, stale_cache=running_stale or prefix_stale
        )


class WeightObserver:
    """Follows an engine's weights. One per engine, made before anything is sampled by it."""

    def __init__(self, engine: object) -> None:
        """Watch `engine`, an `AsyncLLM` or one that has its control methods, by standing before these from now on."""
        self.clock = 0
        """Counts events that matter to cached computations."""
        self.cleared = 0
        """When everything cached was last cleared."""
        self.stale_update = 0
        """When an update last found something cached."""
        self.uncertain_update = 0
        """When the latest update was closed, if generation was not paused around it; else 0."""
        self.prefix_is_stale = False
        """Whether cached prefixes may be those of earlier weights."""
        self._name = ""
        self._unnamed_updates = 0
        self._update_open = False
        self._paused = False
        self._control_calls = 0
        self._opened_while_sampling = False
        self._cache_empty = False
        self._prefixes_empty = False
        self._latest = self._all_ways()
        self._engine = engine
        self._watched: dict[str, object] = {}
        self._watch()

    @property
    def version(self) -> str:
        """The version of the weights that would sample the next token."""
        return self._version(self._unnamed_updates + self._update_open)

    @property
    def held(self) -> bool:
        """Whether the engine is paused or asleep, or one of its watched methods has not returned."""
        return self._paused or self._control_calls > 0

    def weights(self, *, boundary_uncertain: bool, stale_cache: bool) -> Weights:
        """Return the weights of the latest step; the same object as long as they are the same."""
        return self._latest[boundary_uncertain][stale_cache]

    def note_step(self, stamp: str | None) -> None:
        """Note an output stamped with `stamp`: it closes an open update, and fills the caches again.

        What comes while generation is paused was sampled before the pause.
        """
        name = self._name if stamp is None else "" if stamp == _UNNAMED else stamp
        if self._paused and name == self._name:
            return
        self._cache_empty, was_empty = False, self._cache_empty
        self._prefixes_empty, had_no_prefixes = False, self._prefixes_empty
        if not self._update_open and name == self._name:
            return
        self.clock += 1
        self._unnamed_updates = self._unnamed_updates + 1 if name == self._name else 0
        self._name = name
        if self._update_open:
            if not was_empty:
                self.stale_update = self.clock
            self.prefix_is_stale = not (was_empty or had_no_prefixes)
            self.uncertain_update = self.clock if self._opened_while_sampling else 0
            self._update_open = False
        self._latest = self._all_ways()

    def detach(self) -> None:
        """Watch no longer; the engine's methods are its own again."""
        for name, watched in self._watched.items():
            if vars(self._engine).get(name) is watched:
                delattr(self._engine, name)

    def _all_ways(self) -> list[list[Weights]]:
        """Return the present weights, by whether the boundary is uncertain and whether the cache is stale."""
        version = self._version(self._unnamed_updates)
        return [
            [Weights(version, boundary_uncertain=uncertain, stale_cache=stale) for stale in (False, True)]
            for uncertain in (False, True)
        ]

    def _version(self, unnamed_updates: int) -> str:
        if not unnamed_updates:
            return self._name
        return f"{self._name}+{unnamed_updates}" if self._name else str(unnamed_updates)

    def _watch(self) -> None:
        for name, before, after in (
            ("collective_rpc", self._on_worker_call, None),
            ("pause_generation", None, self._on_paused),
            ("resume_generation", self._on_resumed, None),
            ("sleep", None, self._on_asleep),
            ("wake_up", None, self._on_awake),
            ("reset_prefix_cache", None, self._on_cache_reset),
        ):
            method: Callable[..., Awaitable[Any]] = getattr(self._engine, name)
            self._watched[name] = self._standing_before(method, before, after)
            setattr(self._engine, name, self._watched[name])

    def _on_worker_call(self, method: object, *_: Any, **__: Any) -> None:
        name = method if isinstance(method, str) else getattr(method, "__name__", "")
        if not _CHANGES_WEIGHTS.search(name):
            return
        self._opened_while_sampling = not self._paused or (self._update_open and self._opened_while_sampling)
        self._update_open = True

    def _on_paused(self, _result: object, *, clear_cache: bool = True, **_: Any) -> None:
        self._paused = True
        if clear_cache:
            self._clear_all()

    def _on_resumed(self, *_: Any, **__: Any) -> None:
        self._paused = False

    def _on_asleep(self, _result: object, level: int = 1, *_: Any, **__: Any) -> None:
        self._paused = True
        if level >= 1:
            self._clear_all()

    def _on_awake(self, fully: object, *_: Any, **__: Any) -> None:
        # An engine that is woken part by part samples again when it is all awake; earlier vLLMs do not say.
        if fully is not False:
            self._on_resumed()

    def _on_cache_reset(self, done: object, reset_running_requests: bool = False, *_: Any, **__: Any) -> None:
        # vLLM clears nothing while requests hold blocks, and says so.
        if done is False:
            return
        if reset_running_requests:
            self._clear_all()
        self._prefixes_empty = True
        self.prefix_is_stale = False

    def _clear_all(self) -> None:
        self.clock += 1
        self.cleared = self.clock
        self._cache_empty = True
        self.prefix_is_stale = False

    def _standing_before(
        self,
        method: Callable[..., Awaitable[Any]],
        before: Callable[..., None] | None,
        after: Callable[..., None] | None,
    ) -> Callable[..., Awaitable[Any]]:
        """Return `method`, telling `before` its arguments when it is called, and `after` its result and them."""

        @functools.wraps(method)
        async def call(*args: Any, **kwargs: Any) -> object:
            if before is not None:
                before(*args, **kwargs)
            self._control_calls += 1
            try:
                result = await method(*args, **kwargs)
            finally:
                self._control_calls -= 1
            if after is not None:
                after(result, *args, **kwargs)
            return result

        return call
