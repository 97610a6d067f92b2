"""The sidecar's errors. Each means one gRPC status; `rpc_errors.py` holds the table."""

from __future__ import annotations


class TokentapeError(Exception):
    """An error whose message is meant for the caller."""


class InvalidArgument(TokentapeError):
    """A field of the request is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        """`field` is its path in the request, as in `sampling.temperature`."""
        super().__init__(f"{field}: {problem}")
        self.field = field


class ContextOverflow(TokentapeError):
    """The prompt leaves no room for a token. Its message says "context length" and both numbers."""

    def __init__(self, prompt_token_count: int, max_context_tokens: int) -> None:
        """Both in tokens."""
        super().__init__(
            f"prompt_token_ids: the maximum context length is {max_context_tokens} tokens, but the prompt has "
            f"{prompt_token_count}, which leaves no room to sample"
        )


class NotFound(TokentapeError):
    """Something that the request names does not exist."""


class AlreadyExists(TokentapeError):
    """The name that the request wants to give is taken."""


class Unauthenticated(TokentapeError):
    """Who asks is not let in any more."""


class PermissionDenied(TokentapeError):
    """The reader token is not the tape's."""


class TapeSealed(TokentapeError):
    """The tape takes no more calls, for good."""


class LimitReached(TokentapeError):
    """A limit of the tape or of the sidecar is reached."""


class SequenceOutOfRange(TokentapeError):
    """A sequence number beyond the end of the tape."""


class EngineDead(TokentapeError):
    """The engine is gone; nothing more can be sampled until it is restarted."""


class EngineStalled(TokentapeError):
    """The engine is there and gives nothing; it may come back."""

    def __init__(self, silent_seconds: float) -> None:
        """`silent_seconds` is how long it had given nothing when that was noticed."""
        super().__init__(f"the engine has stalled: it has emitted nothing for {silent_seconds:g} s")


class WeightsBroken(TokentapeError):
    """The engine's weights are of no one version; nothing is sampled until an update of them succeeds."""

    def __init__(self) -> None:
        """Say so; what went wrong is the controller's to know."""
        super().__init__("an update of the weights failed half way; nothing is sampled until one succeeds")


class StaleWeights(TokentapeError):
    """The weights changed more often during a call than its tape allows."""

    def __init__(self, changes: int, allowed: int) -> None:
        """Both count changes of the weights since the call's first sampled token."""
        super().__init__(
            f"tape_id: the weights have changed {changes} times since this call's first token, and the tape lets a "
            f"call live through {allowed} (max_weight_changes)"
        )


class StateForbids(TokentapeError):
    """The engine's state does not allow what a controller asks."""


class Unsupported(TokentapeError):
    """The engine cannot do what a controller asks."""


class ControlFailed(TokentapeError):
    """The engine failed at what a controller asked; the message has its words."""


class EngineBusy(TokentapeError):
    """The engine takes no more calls for the moment."""


class EngineNotLoaded(TokentapeError):
    """The engine could not be started; the sidecar does not serve."""


class ShuttingDown(TokentapeError):
    """The sidecar takes no more calls because it is stopping."""


class TextUnavailable(TokentapeError):
    """The text of tokens is wanted, and the model has no tokenizer that the sidecar can read."""


class CallError(TokentapeError):
    """The engine failed this one call, or gave it an unusable log-probability."""
