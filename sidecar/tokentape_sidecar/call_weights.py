"""The weights as one call meets them: the present ones, and what of its own start and cache makes them uncertain."""

from __future__ import annotations

from tokentape_sidecar.engine import UNVERSIONED, Weights
from tokentape_sidecar.weights import WeightObserver


class CallWeights:
    """The weights as one call meets them; made when the call starts."""

    __slots__ = ("_born", "_born_stale", "_changes", "_observer", "_stamp", "_weights")

    def __init__(self, observer: WeightObserver) -> None:
        self._observer = observer
        self._born = observer.clock
        self._born_stale = observer.prefix_is_stale
        self._changes = -1
        self._stamp: str | None = None
        self._weights = UNVERSIONED

    def of_step(self, stamp: str | None) -> Weights:
        """Return the weights that sampled a step which the engine stamped with `stamp` (`None`: with nothing)."""
        observer = self._observer
        # With the same stamp, and nothing changed since the last one was noted, noting it again changes nothing.
        if observer.changes != self._changes or stamp != self._stamp:
            observer.note_step(stamp)
            self._changes, self._stamp, self._weights = observer.changes, stamp, self._of_latest()
        return self._weights

    def _of_latest(self) -> Weights:
        observer = self._observer
        running_stale = observer.stale_update > max(self._born, observer.cleared)
        prefix_stale = self._born_stale and observer.cleared <= self._born
        return observer.weights(
            boundary_uncertain=observer.uncertain_update > self._born, stale_cache=running_stale or prefix_stale
        )
