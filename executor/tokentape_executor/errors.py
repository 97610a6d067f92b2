"""The executor's errors, and the one table from gRPC statuses to them.

A rollout that cannot give a sample raises a `RolloutError`; the subclass says why, and `retryable` whether running the
same rollout again may succeed. Every error can be pickled (it crosses process borders in Ray): each is made from its
message alone, so the message carries the cause's words too.
"""

from __future__ import annotations

from typing import ClassVar

import grpc
import grpc.aio


class ExecutorError(Exception):
    """Any error of this package."""


class StartFailed(ExecutorError):
    """A process or service that rollouts need did not start; the message has the end of its log."""


class ImagesUnsupported(ExecutorError):
    """Prompts with images are not supported: they would need the image's placeholder tokens on the tape."""


class PromptRefused(ExecutorError):
    """A prompt that already carries the chat template's markup, and not in the one form that can be unwrapped."""


class RolloutError(ExecutorError):
    """One rollout failed."""

    retryable: ClassVar[bool] = False
    """Whether the same rollout, started anew, may succeed."""


class SidecarUnavailable(RolloutError):
    """The sidecar could not be reached, or its engine is dead."""

    retryable = True


class SidecarOverloaded(RolloutError):
    """The sidecar holds as many tapes or calls as it may."""

    retryable = True


class TapeLost(RolloutError):
    """The sidecar does not know the tape any more: it was restarted, or the tape was deleted."""

    retryable = True


class RolloutRefused(RolloutError):
    """The sidecar refused what the rollout asked for; asking again would not help."""


class WeightsChanged(RolloutError):
    """The weights changed more often during a call than the rollout allows (`max_weight_changes`)."""

    retryable = True


class SidecarFailed(RolloutError):
    """The sidecar, or its engine in one call, had an error of its own."""

    retryable = True


class PolicyUnavailable(RolloutError):
    """No bridge serves the policy, or it stopped while a rollout needed it."""

    retryable = True


class AgentUnavailable(RolloutError):
    """The agent's server could not be reached, or dropped the connection."""

    retryable = True


class AgentFailed(RolloutError):
    """The agent ran and raised or reported an error."""

    retryable = True


class RewardInvalid(RolloutError):
    """The agent ran and returned no reward, or one that is not a finite number."""

    retryable = True


class RolloutTimeout(RolloutError):
    """The rollout, or one turn of it, took longer than its limit."""

    retryable = True


class TapeInconsistent(RolloutError):
    """The tape's entries contradict each other or the contract. Always a bug, never the model's doing."""


class NothingSampled(RolloutError):
    """The rollout ended without one sampled token, so there is nothing to train on."""

    retryable = True


_BY_STATUS: dict[grpc.StatusCode, type[RolloutError]] = {
    grpc.StatusCode.UNAVAILABLE: SidecarUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: SidecarUnavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: SidecarOverloaded,
    grpc.StatusCode.NOT_FOUND: TapeLost,
    grpc.StatusCode.ABORTED: WeightsChanged,
    grpc.StatusCode.INVALID_ARGUMENT: RolloutRefused,
    grpc.StatusCode.OUT_OF_RANGE: RolloutRefused,
    grpc.StatusCode.FAILED_PRECONDITION: RolloutRefused,
    grpc.StatusCode.ALREADY_EXISTS: RolloutRefused,
    grpc.StatusCode.PERMISSION_DENIED: RolloutRefused,
    grpc.StatusCode.UNAUTHENTICATED: RolloutRefused,
    grpc.StatusCode.UNIMPLEMENTED: RolloutRefused,
}


def from_rpc_error(action: str, error: grpc.aio.AioRpcError) -> RolloutError:
    """Return what a failed RPC means for the rollout. `action` says what was being done, as in "opening a tape"."""
    kind = _BY_STATUS.get(error.code(), SidecarFailed)
    return kind(f"{action} failed with {error.code().name}: {error.details()}")
