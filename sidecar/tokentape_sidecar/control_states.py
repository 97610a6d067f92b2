"""The engine's states, as a controller sees them, and what it may ask in each.

The state after each operation; `-`: it changes nothing. An empty cell is refused with `StateForbids`. In the states
DEAD and STALLED all are refused, with `EngineDead` and `EngineStalled`.

|                    | RUNNING | PAUSED  | ASLEEP                 | WEIGHTS_BROKEN   | UPDATING_WEIGHTS |
|--------------------|---------|---------|------------------------|------------------|------------------|
| pause              | PAUSED  | (mode)  |                        | (stays paused)   |                  |
| resume             | -       | RUNNING |                        |                  |                  |
| update weights     | (done)  | (done)  | (once weights are back)| as before, mended|                  |
| set weight version | (done)  | (done)  | (done)                 |                  |                  |
| reset prefix cache | (done)  | (done)  |                        |                  |                  |
| sleep              | ASLEEP  | ASLEEP  | -                      |                  |                  |
| wake up            | -       | -       | RUNNING                |                  |                  |
"""

from __future__ import annotations

import enum

from tokentape_sidecar.errors import EngineDead, StateForbids


class State(enum.Enum):
    """A phase of the engine's life, as in `tokentape.v1.EngineState`; the value completes "the engine …"."""

    RUNNING = "samples"
    PAUSED = "is paused"
    ASLEEP = "sleeps"
    UPDATING_WEIGHTS = "is given weights by somebody else"
    WEIGHTS_BROKEN = "has weights of an update that failed half way"
    STALLED = "has stalled"
    DEAD = "is dead"


class Operation(enum.Enum):
    """What a controller asks."""

    PAUSE = "pause generation"
    RESUME = "resume generation"
    UPDATE_WEIGHTS = "update the weights"
    SET_WEIGHT_VERSION = "set the weight version"
    RESET_PREFIX_CACHE = "reset the prefix cache"
    SLEEP = "sleep"
    WAKE_UP = "wake up"


_ALLOWED = {
    State.RUNNING: frozenset(Operation),
    State.PAUSED: frozenset(Operation),
    State.ASLEEP: frozenset({Operation.SET_WEIGHT_VERSION, Operation.SLEEP, Operation.WAKE_UP}),
    State.WEIGHTS_BROKEN: frozenset({Operation.UPDATE_WEIGHTS, Operation.PAUSE}),
}
_CHANGES_NOTHING = {
    (State.RUNNING, Operation.RESUME),
    (State.RUNNING, Operation.WAKE_UP),
    (State.PAUSED, Operation.WAKE_UP),
    (State.ASLEEP, Operation.SLEEP),
}


def changes_nothing(state: State, operation: Operation) -> bool:
    """Whether the engine is already as `operation` would have it."""
    return (state, operation) in _CHANGES_NOTHING


def check_allowed(state: State, operation: Operation, *, asleep: bool, weights_back: bool) -> None:
    """Raise `EngineDead` or `StateForbids` where `operation` may not be done.

    `asleep`: the engine sleeps, whatever else is to be said of it; `weights_back`: all but the memory of its weights.
    """
    if state is State.DEAD:
        raise EngineDead("the engine is dead")
    allowed = _ALLOWED.get(state, frozenset[Operation]())
    if asleep:
        # An engine that sleeps cannot be paused: waking it would end that.
        allowed = allowed - {Operation.PAUSE} | ({Operation.UPDATE_WEIGHTS} if weights_back else set[Operation]())
    if operation not in allowed:
        raise StateForbids(f"cannot {operation.value} while the engine {state.value}")
