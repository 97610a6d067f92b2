"""The script format of the scripted engine: which tokens each call gets, when, and how it ends.

A script is a JSON file:

    {"model": {"name": "toy", "max_model_len": 64, "vocab_size": 151936, "eos_token_ids": [151645]},
     "calls": [{"expect": {"prompt_token_ids": [1, 2]}, "prompt_logprobs": [{"2": -0.5, "9": -1.5}],
                "steps": [{"index": 0, "token_ids": [42, 7], "logprobs": [{"13": -0.7, "42": -4.2}, {"7": -0.1}],
                           "delay_ms": 20, "weight_version": "3"},
                          {"text": " and so on", "finish_reason": "stop"}]}],
     "repeat": false}

`sidecar/README.md` says what each field means. A field that is not known, or of the wrong type, is an error that names
its place in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ScriptError(ValueError):
    """A script that cannot be used; the message names the file and the place in it."""


# What a protobuf uint32 holds. Ids beyond the vocabulary are let through: engines have been seen to sample them.
_TokenId = Annotated[int, Field(ge=0, lt=2**32)]
_Logprobs = dict[_TokenId, float]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptedModel(_Strict):
    """What the scripted engine claims to serve; lengths in tokens."""

    name: str = "scripted"
    max_model_len: int = Field(default=4096, ge=1)
    vocab_size: int = Field(default=151_936, ge=1)
    eos_token_ids: tuple[_TokenId, ...] = ()
    max_logprobs: int = Field(default=20, ge=0)
    lora_names: tuple[str, ...] = ()


class Expectation(_Strict):
    """What the call must have asked for; anything else fails it."""

    prompt_token_ids: tuple[_TokenId, ...]


class Step(_Strict):
    """One engine step of one choice: tokens, a pause before them, and perhaps the end."""

    index: int = Field(default=0, ge=0)
    token_ids: tuple[_TokenId, ...] = ()
    logprobs: tuple[_Logprobs | None, ...] | None = None
    text: str | None = None
    delay_ms: float = Field(default=0, ge=0)
    weight_version: str | None = None
    finish_reason: Literal["stop", "length", "abort", "repetition"] | None = None
    stop_reason: _TokenId | str | None = None
    error: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.text is not None and self.token_ids:
            raise ValueError("text and token_ids exclude each other")
        return self


class ScriptedCall(_Strict):
    """The steps of one call, for all of its choices."""

    expect: Expectation | None = None
    prompt_logprobs: tuple[_Logprobs, ...] | None = None
    steps: tuple[Step, ...]


class Script(_Strict):
    """A whole script; with `repeat`, it starts from the first call again after the last."""

    model: ScriptedModel = ScriptedModel()
    calls: tuple[ScriptedCall, ...]
    repeat: bool = False

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a script file. Raises `ScriptError` where it is missing, not JSON, or not a script."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ScriptError(f"cannot read the script {path}: {error.strerror}") from None
        except ValidationError as error:
            places = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or 'the file'}: {problem['msg']}" for problem in error.errors()
            )
            raise ScriptError(f"{path} is not a script: {places}") from None
