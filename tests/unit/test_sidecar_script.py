"""Scripts: every mistake is named with the file and its place in it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tokentape_sidecar.script import Script, ScriptError

WHOLE = {
    "model": {
        "name": "toy",
        "max_model_len": 64,
        "vocab_size": 151936,
        "eos_token_ids": [151645],
        "max_logprobs": 5,
        "lora_names": ["math"],
    },
    "calls": [
        {
            "expect": {"prompt_token_ids": [1, 2]},
            "prompt_logprobs": [{"2": -0.5, "9": -1.5}],
            "steps": [
                {
                    "index": 0,
                    "token_ids": [42, 7],
                    "logprobs": [{"13": -0.7, "42": "NaN"}, {"7": "-Infinity"}],
                    "delay_ms": 20,
                    "weight_version": "3",
                },
                {"text": " and so on", "finish_reason": "stop", "stop_reason": 7},
                {"error": "raise this instead"},
            ],
        }
    ],
    "repeat": True,
}


def load(tmp_path: Path, content: object) -> Script:
    file = tmp_path / "script.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return Script.load(file)


def test_every_field_of_the_format_is_read(tmp_path: Path) -> None:
    script = load(tmp_path, WHOLE)
    assert script.model.model_dump(mode="json") == WHOLE["model"]
    assert script.repeat
    (call,) = script.calls
    assert call.expect is not None
    assert call.expect.prompt_token_ids == (1, 2)
    assert call.prompt_logprobs == ({2: -0.5, 9: -1.5},)
    tokens, text, error = call.steps
    assert (tokens.index, tokens.token_ids, tokens.delay_ms, tokens.weight_version) == (0, (42, 7), 20, "3")
    assert tokens.logprobs is not None
    first, second = tokens.logprobs
    assert first is not None
    assert second is not None
    assert first[13] == -0.7
    assert math.isnan(first[42])
    assert second == {7: -math.inf}
    assert (text.text, text.finish_reason, text.stop_reason) == (" and so on", "stop", 7)
    assert error.error == "raise this instead"


def test_only_calls_are_needed(tmp_path: Path) -> None:
    script = load(tmp_path, {"calls": []})
    assert (script.calls, script.repeat, script.model.name) == ((), False, "scripted")


def with_step(**step: object) -> object:
    return {"calls": [{"steps": [{"token_ids": [1]}, step]}]}


MISTAKES: list[tuple[object, str]] = [
    ("{", "the file"),
    ("[]", "the file"),
    ({}, "calls"),
    ({"calls": [], "cals": []}, "cals"),
    ({"calls": [], "repeat": "often"}, "repeat"),
    ({"calls": [], "model": {"max_model_len": 0}}, "model.max_model_len"),
    ({"calls": [], "model": {"vocab_size": "many"}}, "model.vocab_size"),
    ({"calls": [], "model": {"nam": "toy"}}, "model.nam"),
    ({"calls": [{}]}, "calls.0.steps"),
    ({"calls": [{"steps": [], "expect": {}}]}, "calls.0.expect.prompt_token_ids"),
    ({"calls": [{"steps": [], "expects": {}}]}, "calls.0.expects"),
    (with_step(token_ids=["a"]), "calls.0.steps.1.token_ids.0"),
    (with_step(token_ids=[-1]), "calls.0.steps.1.token_ids.0"),
    (with_step(token_ids=[2**32]), "calls.0.steps.1.token_ids.0"),
    (with_step(index=-1), "calls.0.steps.1.index"),
    (with_step(delay_ms=-1), "calls.0.steps.1.delay_ms"),
    (with_step(finish_reason="done"), "calls.0.steps.1.finish_reason"),
    (with_step(stop_reason=-1), "calls.0.steps.1.stop_reason"),
    (with_step(logprobs=[{"x": -1.0}]), "calls.0.steps.1.logprobs.0"),
    (with_step(token_ids=[1], text="a"), "calls.0.steps.1"),
]


@pytest.mark.parametrize(("content", "place"), MISTAKES)
def test_a_mistake_is_named_with_the_file_and_its_place(tmp_path: Path, content: object, place: str) -> None:
    with pytest.raises(ScriptError) as caught:
        load(tmp_path, content)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'script.json'} is not a script: ")
    assert f" {place}" in message
    assert "\n" not in message


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"repeat: .*; nonsense: "):
        load(tmp_path, {"calls": [], "repeat": "often", "nonsense": 1})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=rf"cannot read the script {tmp_path}/none.json: No such file"):
        Script.load(tmp_path / "none.json")
