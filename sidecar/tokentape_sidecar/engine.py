"""The engine port: what the sidecar asks of an inference engine, and what it gets back.

An adapter implements `Engine`. It writes every sampled token to the `Sink` that came with the call, once per engine
step, and nothing else ever reaches the sidecar from the engine. The port knows neither vLLM nor protobuf.

Rules that every adapter keeps:

1. The sink of a call hears any number of `append`s, one `finish` per choice, and no more; or `fail` in place of what is
   still missing. `submit` raises for a call that was not taken; its sink need not hear of that.
2. `len(logprobs) == len(token_ids)` in every `append`; the values are the sampled tokens' own and finite.
3. `abort` ends the engine's work by the engine's own means. What was sampled until then is appended, then every open
   choice finishes with `FinishReason.ABORT`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, Protocol

from tokentape_sidecar.engine_controls import EngineControls


class FinishReason(enum.Enum):
    """Why a choice got no more tokens; the same reasons as `tokentape.v1.FinishReason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REPETITION = "repetition"


class LogprobsMode(enum.Enum):
    """Which distribution log-probabilities belong to."""

    RAW = "raw"
    """The model's softmax, before temperature, penalties and truncation."""
    PROCESSED = "processed"
    """The distribution that was sampled from."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A form that the completion must have.

    `form` names the engine's language and `value` is a text in it (a tuple of texts for `choices`; unused for
    `json_object`).
    """

    form: Literal["json_schema", "json_object", "regex", "grammar", "choices", "structural_tag"]
    value: str | tuple[str, ...] = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Absent (`None`) means the model's default; the fields mean what `SamplingParameters` says."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None

    def overlaid(self, over: Sampling) -> Sampling:
        """Return these parameters with every field that is present in `over` taken from there."""
        present = {f.name: value for f in fields(over) if (value := getattr(over, f.name)) not in (None, (), {})}
        return replace(self, **present)


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One call as the engine gets it: validated, limits applied, `max_tokens` and `n` present in `sampling`."""

    call_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    priority: int = 0
    lora_name: str = ""
    """One of the model's `lora_names`; empty: the base model."""
    cache_salt: str = ""
    trace_headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the engine's own spans, if it makes any, belong below: W3C's headers. Empty: there is no trace."""


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine serves. Counts are in tokens."""

    name: str
    max_context_tokens: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    logprobs_mode: LogprobsMode
    default_sampling: Sampling
    max_top_logprobs: int
    engine: str
    engine_version: str
    tokenizer_directory: Path
    lora_names: tuple[str, ...] = ()
    """The adapters that a call may name."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that sampled a token."""

    version: str = ""
    """Empty while none was ever set."""
    boundary_uncertain: bool = False
    """Whether the version may begin a few tokens earlier or later: the weights changed while the engine sampled."""
    stale_cache: bool = False
    """Whether the token was sampled on cached computations of earlier weights."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The `k` most probable tokens at each of a run of positions, flat: position i is at `[i * k, (i + 1) * k)`."""

    k: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]


UNVERSIONED = Weights()
"""Weights that nobody has named or changed."""


class Sink(Protocol):
    """Where an adapter writes one call. All methods are called on the event loop, never from another thread."""

    def take_prompt_logprobs(self, logprobs: Sequence[float], top_logprobs: TopLogprobs | None) -> None:
        """Take the prompt's log-probabilities, one less than its tokens: the first token has none.

        Comes once, before any token, where `prompt_logprobs` was set.
        """
        ...

    def append(
        self,
        choice: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        weights: Weights = UNVERSIONED,
        top_logprobs: TopLogprobs | None = None,
    ) -> None:
        """Take tokens that `choice` sampled: `token_ids` and `logprobs` of one length, at least 1."""
        ...

    def finish(self, choice: int, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End `choice`; `stop_reason` is the stop token id or stop string that matched, `None` for the model's eos."""
        ...

    def fail(self, error: Exception) -> None:
        """End the whole call by an error; what its choices have stands."""
        ...


class Engine(Protocol):
    """An inference engine, as the sidecar sees it."""

    @property
    def model(self) -> Model:
        """What the engine serves; constant."""
        ...

    @property
    def weight_version(self) -> str:
        """The version of the weights that would sample the next token; empty while none was ever set."""
        ...

    @property
    def held(self) -> bool:
        """Whether somebody keeps the engine from sampling just now: by a pause, sleep, or a change of its weights."""
        ...

    @property
    def controls(self) -> EngineControls:
        """What pauses it, changes its weights and lets it sleep."""
        ...

    async def submit(self, call: EngineCall, sink: Sink) -> None:
        """Start `call` and return; its tokens go to `sink` as they are sampled.

        Raises `InvalidArgument` for what only the engine can judge (a grammar, say), `EngineDead` when there is no
        engine any more.
        """
        ...

    async def abort(self, call_id: str) -> None:
        """End a running call; returns when the engine was told. An unknown or finished call is left alone."""
        ...

    async def ping(self) -> None:
        """Ask whatever it is that samples, and return when it has answered; not before a stopped engine goes on."""
        ...

    async def wait_dead(self) -> None:
        """Return when the engine has died by itself; never otherwise."""
        ...

    async def close(self) -> None:
        """Stop the engine and free what it holds. Calls still running fail."""
        ...
