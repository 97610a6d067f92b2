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
        return observer.weights(stale_cache=running_stale or prefix_stale)


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
        self.prefix_is_stale = False
        """Whether cached prefixes may be those of earlier weights."""
        self._name = ""
        self._unnamed_updates = 0
        self._update_open = False
        self._paused = False
        self._boundary_uncertain = False
        self._cache_empty = False
        self._prefixes_empty = False
        self._latest = self._both_ways()
        self._engine = engine
        self._watched: dict[str, object] = {}
        self._watch()

    @property
    def version(self) -> str:
        """The version of the weights that would sample the next token."""
        return self._version(self._unnamed_updates + self._update_open)

    def weights(self, *, stale_cache: bool) -> Weights:
        """Return the weights of the latest step; the same object as long as they are the same."""
        return self._latest[stale_cache]

    def note_step(self, stamp: str | None) -> None:
        """Note an output stamped with `stamp`: it closes an open update, and fills the caches again."""
        self._cache_empty, was_empty = False, self._cache_empty
        self._prefixes_empty, had_no_prefixes = False, self._prefixes_empty
        name = self._name if stamp is None else "" if stamp == _UNNAMED else stamp
        if not self._update_open and name == self._name:
            return
        self.clock += 1
        self._unnamed_updates = self._unnamed_updates + 1 if name == self._name else 0
        self._name = name
        if self._update_open:
            if not was_empty:
                self.stale_update = self.clock
            self.prefix_is_stale = not (was_empty or had_no_prefixes)
            self._update_open = False
        self._latest = self._both_ways()

    def detach(self) -> None:
        """Watch no longer; the engine's methods are its own again."""
        for name, watched in self._watched.items():
            if vars(self._engine).get(name) is watched:
                delattr(self._engine, name)

    def _both_ways(self) -> tuple[Weights, Weights]:
        """Return the present weights on a good cache and on a stale one."""
        version, uncertain = self._version(self._unnamed_updates), self._boundary_uncertain
        return Weights(version, uncertain), Weights(version, uncertain, stale_cache=True)

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
            ("wake_up", None, self._on_resumed),
            ("reset_prefix_cache", None, self._on_cache_reset),
        ):
            method: Callable[..., Awaitable[Any]] = getattr(self._engine, name)
            self._watched[name] = _watched(method, before, after)
            setattr(self._engine, name, self._watched[name])

    def _on_worker_call(self, method: object, *_: Any, **__: Any) -> None:
        if not isinstance(method, str) or not _CHANGES_WEIGHTS.search(method):
            return
        if not self._update_open:
            self._update_open = True
            self._boundary_uncertain = not self._paused
        elif not self._paused:
            self._boundary_uncertain = True

    def _on_paused(self, *, clear_cache: bool = True, **_: Any) -> None:
        self._paused = True
        if clear_cache:
            self._clear_all()

    def _on_resumed(self, *_: Any, **__: Any) -> None:
        self._paused = False

    def _on_asleep(self, *_: Any, **__: Any) -> None:
        self._paused = True
        self._clear_all()

    def _on_cache_reset(self, reset_running_requests: bool = False, *_: Any, **__: Any) -> None:
        if reset_running_requests:
            self._clear_all()
        self._prefixes_empty = True
        self.prefix_is_stale = False

    def _clear_all(self) -> None:
        self.clock += 1
        self.cleared = self.clock
        self._cache_empty = True
        self.prefix_is_stale = False


def _watched(
    method: Callable[..., Awaitable[Any]], before: Callable[..., None] | None, after: Callable[..., None] | None
) -> Callable[..., Awaitable[Any]]:
    """Return `method`, telling its arguments to `before` when it is called and to `after` when it has succeeded."""

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> object:
        if before is not None:
            before(*args, **kwargs)
        result = await method(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    return call
