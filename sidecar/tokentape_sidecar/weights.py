"""Which weights sample the next token, learnt from what is done to the engine.

vLLM 0.32 and later stamp their outputs with a version, but only if somebody names one; earlier ones stamp nothing, and
a trainer that drives the engine itself (OpenRLHF) names none. So the engine object's own methods are watched: the first
call that changes weights begins an update, and the next output after it is the first of the new weights. A version is
the name that was given, if any, and the number of unnamed updates since.

Where the new version's tokens begin is certain if generation was paused around the update. And what was computed before
an update stays in the engine's cache unless that is cleared: tokens sampled on a kept cache belong to neither version.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tokentape_sidecar.engine import Weights
from tokentape_sidecar.engine_controls import MEMORY_TAGS, Phase

# The workers' methods that change weights, in vLLM (reload_weights, update_weights, start_weight_update) and in
# trainers' own worker extensions (OpenRLHF: update_weight, update_weight_cuda_ipc).
_CHANGES_WEIGHTS = re.compile(r"(?:^|_)(?:update|load|reload|set|start|finish)_(?:\w+_)?weights?(?:_|$)")

# What vLLM calls weights that nobody has named.
_UNNAMED = "default"


class _Version(NamedTuple):
    """A name that somebody gave, and how many updates there were since that nobody named."""

    name: str = ""
    unnamed_updates: int = 0

    def __str__(self) -> str:
        if not self.unnamed_updates:
            return self.name
        return f"{self.name}+{self.unnamed_updates}" if self.name else str(self.unnamed_updates)


class WeightObserver:
    """Follows an engine's weights. One per engine, made before anything is sampled by it."""

    def __init__(self, engine: object) -> None:
        """Watch `engine`, an `AsyncLLM` or one that has its control methods, by standing before these from now on."""
        self.changes = 0
        """Grows with every change of what is noted here; while it stays, a step of the same stamp changes nothing."""
        self.clock = 0
        """Counts events that matter to cached computations."""
        self.cleared = 0
        """When everything cached was last cleared."""
        self.stale_update = 0
        """When an update last found something cached."""
        self.uncertain_update = 0
        """When the latest update was closed, or naming was, if generation was not paused around it; else 0."""
        self.prefix_is_stale = False
        """Whether cached prefixes may be those of earlier weights."""
        self._sampled = _Version()
        """What sampled the latest step."""
        self._next = _Version()
        """What would sample the next one."""
        self._changed = False
        """Whether weights were changed since the latest step."""
        self._changing = False
        """Whether a further call that changes weights belongs to the same update."""
        self._changed_while_sampling = False
        self._named_at = 0
        """When the weights were last named while the engine sampled; 0 once a step has come since."""
        self._paused = False
        self._asleep: frozenset[str] = frozenset()
        """What of the engine's memory is released."""
        self._holding_calls = 0
        self._resumptions = 0
        """Calls that end a pause and have not returned."""
        self._weight_calls = 0
        self._callbacks: list[Callable[[], None]] = []
        self._cache_empty = False
        self._prefixes_empty = False
        self._latest = self._all_ways()
        self._engine = engine
        self._watched: dict[str, object] = {}
        self._watch()

    @property
    def version(self) -> str:
        """The version of the weights that would sample the next token."""
        return str(self._next)

    @property
    def phase(self) -> Phase:
        """What the engine was last told to do."""
        if self._asleep:
            return Phase.ASLEEP
        return Phase.PAUSED if self._paused else Phase.RUNNING

    @property
    def updating(self) -> bool:
        """Whether a call that changes weights has not returned."""
        return self._weight_calls > 0

    @property
    def held(self) -> bool:
        """Whether the engine is paused or asleep, or a call has not returned that moves weights or memory.

        What else is asked of an engine it answers between two steps; one that does not is not held, but silent.
        """
        return (self._paused and not self._resumptions) or self._holding_calls > 0

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the beginning of every update."""
        self._callbacks.append(callback)

    def end_update(self) -> None:
        """Note that a further call that changes weights begins another update."""
        self._changing = False

    def name_weights(self, version: str) -> None:
        """Name the present weights, where the engine itself takes no name for them."""
        self._on_named(None, version)
        self.changes += 1

    def weights(self, *, boundary_uncertain: bool, stale_cache: bool) -> Weights:
        """Return the weights of the latest step; the same object as long as they are the same."""
        return self._latest[boundary_uncertain][stale_cache]

    def note_step(self, stamp: str | None) -> None:
        """Note an output stamped with `stamp`: it closes an open update, and fills the caches again.

        What comes while generation is paused was sampled before the pause.
        """
        sampled = self._version_of(stamp)
        if sampled is None:
            return
        self._cache_empty, was_empty = False, self._cache_empty
        self._prefixes_empty, had_no_prefixes = False, self._prefixes_empty
        if sampled == self._sampled and not (self._changed and sampled == self._next):
            return
        self.clock += 1
        self.changes += 1
        self._sampled = sampled
        if self._changed:
            if not was_empty:
                self.stale_update = self.clock
            self.prefix_is_stale = not (was_empty or had_no_prefixes)
        if self._changed:
            self.uncertain_update = self.clock if self._changed_while_sampling else 0
        if stamp is None:
            # Calls that run since before the naming may have sampled this step before it.
            self.uncertain_update = max(self.uncertain_update, self._named_at)
        self._changed, self._changing, self._named_at = False, False, 0
        self._latest = self._all_ways()

    def _version_of(self, stamp: str | None) -> _Version | None:
        """Return which weights sampled a step; `None` for one that comes late, from before a pause."""
        if stamp is None:
            return None if self._paused else self._next
        name = "" if stamp == _UNNAMED else stamp
        if self._paused and name == self._sampled.name:
            return None
        if name == self._next.name:
            return self._next
        if name != self._sampled.name:
            # Somebody named it by other means than the engine object.
            self._next = _Version(name)
            return self._next
        return self._sampled

    def detach(self) -> None:
        """Watch no longer; the engine's methods are its own again."""
        for name, watched in self._watched.items():
            if vars(self._engine).get(name) is watched:
                delattr(self._engine, name)

    def _all_ways(self) -> list[list[Weights]]:
        """Return the present weights, by whether the boundary is uncertain and whether the cache is stale."""
        version = str(self._sampled)
        return [
            [Weights(version, boundary_uncertain=uncertain, stale_cache=stale) for stale in (False, True)]
            for uncertain in (False, True)
        ]

    def _watch(self) -> None:
        for name, after in (
            ("collective_rpc", None),
            ("pause_generation", self._on_paused),
            ("resume_generation", self._on_resumed),
            ("sleep", self._on_asleep),
            ("wake_up", self._on_awake),
            ("reset_prefix_cache", self._on_cache_reset),
            ("update_weight_version", self._on_named),
        ):
            # Only the last may be missing: earlier vLLMs have no versions.
            if name == "update_weight_version" and not hasattr(self._engine, name):
                continue
            method: Callable[..., Awaitable[Any]] = getattr(self._engine, name)
            self._watched[name] = self._standing_before(method, after)
            setattr(self._engine, name, self._watched[name])

    def _begin_update(self) -> None:
        self._changed_while_sampling = not self._paused or (self._changed and self._changed_while_sampling)
        self._changed = True
        if self._changing:
            return
        self._changing = True
        self._next = self._next._replace(unnamed_updates=self._next.unnamed_updates + 1)
        for callback in self._callbacks:
            callback()

    def _on_named(self, _result: object, new_version: str) -> None:
        self._next = _Version("" if new_version == _UNNAMED else new_version)
        if not self._paused:
            self.clock += 1
            self._named_at = self.clock

    def _on_paused(self, _result: object, *, clear_cache: bool = True, **_: Any) -> None:
        self._paused = True
        if clear_cache:
            self._clear_all()

    def _on_resumed(self, *_: Any, **__: Any) -> None:
        self._paused = self._changing = False

    def _on_asleep(self, _result: object, level: int = 1, *_: Any, **__: Any) -> None:
        self._paused = True
        if level >= 1:
            self._asleep = frozenset(MEMORY_TAGS)
            self._clear_all()

    def _on_awake(self, fully: object, tags: list[str] | None = None, *_: Any, **__: Any) -> None:
        # An engine that is woken part by part samples again when it is all awake; earlier vLLMs do not say.
        self._asleep = self._asleep.difference(tags or MEMORY_TAGS)
        if fully or (fully is None and not self._asleep):
            self._asleep = frozenset()
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
        self, method: Callable[..., Awaitable[Any]], after: Callable[..., None] | None
    ) -> Callable[..., Awaitable[Any]]:
        """Return `method`, noting that it is called, and telling `after` its result and arguments."""
        takes_its_time = after in (None, self._on_asleep, self._on_awake)
        resumes = after == self._on_resumed

        @functools.wraps(method)
        async def call(*args: Any, **kwargs: Any) -> object:
            changes_weights = after is None and _changes_weights(*args, **kwargs)
            if changes_weights:
                self._begin_update()
                self.changes += 1
            # While it waits for running requests the engine samples.
            holds = takes_its_time and kwargs.get("mode") != "wait"
            self._holding_calls += holds
            self._resumptions += resumes
            self._weight_calls += changes_weights
            try:
                result = await method(*args, **kwargs)
            finally:
                self._holding_calls -= holds
                self._resumptions -= resumes
                self._weight_calls -= changes_weights
            if after is not None:
                after(result, *args, **kwargs)
                self.changes += 1
            return result

        return call


def _changes_weights(method: object, *_: Any, **__: Any) -> bool:
    """Whether this method of the engine's workers, or function for them, changes weights."""
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    return _CHANGES_WEIGHTS.search(name) is not None
