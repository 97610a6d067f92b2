"""What a sidecar lets its clients take, all together and each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that the sidecar's owner sets; a tape's owner may set narrower ones for a tape (`tape.TapeLimits`)."""

    max_message_bytes: int = 64 * 1024 * 1024
    """The largest message that is taken."""
    max_running_calls: int = 8192
    """Calls that have not ended, at most."""
    max_tapes: int = 65_536
    """Tapes held at once, at most."""
    max_tape_bytes: int = 1024 * 1024 * 1024
    """Memory of one tape, at most: its columns and its log."""
    max_watchers_per_tape: int = 64
    """Watchers that read one tape at once, at most."""
    max_choices: int = 128
    """The largest `sampling.n`."""
    max_top_logprobs: int = 1024
    """The largest `top_logprobs` and `prompt_logprobs`; the engine's own limit may be narrower."""


MAX_NAME_CHARACTERS = 256
"""The longest anchor, cache salt or LoRA adapter's name."""
MAX_FINGERPRINT_CHARACTERS = 64 * 1024
"""The longest context fingerprint; the bridge's grows by 16 characters with each answer that has reasoning."""
MAX_ANCHORS = 16_384
"""The most anchors that one FindCalls may ask for."""

DEFAULT_LIMITS = Limits()
"""What holds where nobody says otherwise."""
