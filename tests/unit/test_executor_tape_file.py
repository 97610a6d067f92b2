"""Tapes written to files and read back, and what a file that is wrong is told."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tape_model import Entry, ModelCall, Token, rollouts, tape_of, write
from tokentape.v1 import generation_pb2, types_pb2
from tokentape_executor.errors import TapeInconsistent
from tokentape_executor.tape_file import StoredTape, TapeFileError, append_tape, read_tapes
from tokentape_executor.tape_script import to_script
from tokentape_sidecar.script import Script

MODEL = generation_pb2.GetModelResponse(
    name="toy",
    max_context_tokens=64,
    vocabulary_size=1000,
    eos_token_ids=[2],
    logprobs_mode=generation_pb2.LOGPROBS_MODE_PROCESSED,
    sidecar_name="main",
    max_top_logprobs=20,
)
TAPE_ID = f"main.{'0' * 32}"

float32 = st.floats(-(2.0**100), 0, width=32)


@st.composite
def tapes(draw: st.DrawFn) -> list[Entry]:
    """Tapes with everything that an entry can hold."""
    entries = write(draw(rollouts(max_calls=3)), draw(st.data()))
    for entry in entries:
        match entry.WhichOneof("entry"):
            case "call_started":
                sampling = entry.call_started.sampling
                sampling.top_p = draw(st.floats(1e-6, 1))
                sampling.seed = draw(st.integers(-(2**63), 2**63 - 1))
                sampling.logit_bias.update(draw(st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100))))
                sampling.stop.extend(draw(st.lists(st.text(max_size=3), max_size=2)))
                sampling.structured_output.CopyFrom(draw(st.sampled_from(STRUCTURED)))
                entry.call_started.anchor = draw(st.text(max_size=4))
            case "tokens_sampled":
                run = entry.tokens_sampled
                run.logprobs[:] = [draw(float32) for _ in run.token_ids]
                if draw(st.booleans()):
                    run.top_logprobs.k = 2
                    run.top_logprobs.token_ids.extend(range(2 * len(run.token_ids)))
                    run.top_logprobs.logprobs.extend([draw(float32), -math.inf] * len(run.token_ids))
            case "choice_finished":
                if draw(st.booleans()):
                    entry.choice_finished.completion.stop_token_id = draw(st.integers(0, 2**32 - 1))
            case _:
                pass
    return entries


STRUCTURED = (
    types_pb2.StructuredOutput(json_object=False),
    types_pb2.StructuredOutput(json_schema='{"type": "object"}'),
    types_pb2.StructuredOutput(choices=types_pb2.StructuredOutput.Choices(values=["a", "\u2028"])),
)


@settings(max_examples=100)
@given(tapes())
def test_entries_come_back_equal(tmp_path_factory: pytest.TempPathFactory, entries: list[Entry]) -> None:
    file = tmp_path_factory.mktemp("tape") / "tapes.jsonl"
    stored = StoredTape.of(TAPE_ID, MODEL, entries)
    append_tape(file, stored)
    (read,) = read_tapes(file)
    assert read == stored
    assert read.entries == tuple(entries)
    assert [entry.SerializeToString(deterministic=True) for entry in read.entries] == [
        entry.SerializeToString(deterministic=True) for entry in entries
    ]


def stored_tape(*calls: ModelCall) -> StoredTape:
    return StoredTape.of(TAPE_ID, MODEL, tape_of(*(calls or (ModelCall((1, 2), ((Token(10, -0.5),),)),))))


def test_a_file_has_a_line_for_each_tape_and_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "tapes.jsonl"
    for _ in range(3):
        append_tape(file, stored_tape())
    text = file.read_text()
    assert text.count("\n") == 3
    assert TAPE_ID not in text
    assert '"main"' not in text
    file.write_text(text.replace("\n", "\n\n"))
    assert len(list(read_tapes(file))) == 3


def test_a_stored_tape_says_when_and_of_what() -> None:
    stored = stored_tape()
    assert stored.created.tzinfo is datetime.UTC
    assert (stored.model.name, stored.model.sidecar_name) == ("toy", "")
    assert stored.trajectory().receipt.sampled == 1
    with pytest.raises(TapeInconsistent, match="not sealed"):
        StoredTape.of(TAPE_ID, MODEL, stored.entries[:-1]).trajectory()


def changed(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda line: line | fields


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda line: {key: value for key, value in line.items() if key != name}


def with_entry(entry: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda line: line | {"entries": [line["entries"][0], entry]}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("tokentape_file"), "not a tape: there is no field tokentape_file"),
        (changed(tokentape_file=2), "tokentape_file: version 2 is newer than 1"),
        (changed(schema_version=9), "schema_version: version 9 is newer than 1"),
        (changed(schema_version="1"), "schema_version: must be a version's number, not '1'"),
        (changed(tokentape_file=True), "tokentape_file: must be a version's number"),
        (without("schema_version"), "schema_version: must be a version's number, not None"),
        (without("entries"), "entries: the field is missing"),
        (changed(colour="red"), "colour: the field is not known"),
        (changed(entries={}), "entries: must be a list, not a dict"),
        (changed(tape_id_sha256=7), "tape_id_sha256: must be a str"),
        (changed(created="yesterday"), "created: must be an ISO 8601 time"),
        (changed(created="2026-11-29T19:12:23"), "created: must be an ISO 8601 time with its zone"),
        (changed(model=[]), r"model: must be an object, not \[\]"),
        (changed(model={"nom": "toy"}), 'model: .* no field named "nom"'),
        (with_entry("?"), r"entries\[1\]: must be an object, not '\?'"),
        (with_entry({"tokens_sampled": {"token_ids": [-1]}}), r"entries\[1\]: .*token_ids field: .*-1"),
        (with_entry({"tokens_sampled": {"token_ids": "10"}}), r"entries\[1\]: .*token_ids"),
        (with_entry({"tokens_sampled": {"colour": 1}}), r'entries\[1\]: .*no field named "colour"'),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], problem: str
) -> None:
    file = tmp_path / "tapes.jsonl"
    append_tape(file, stored_tape())
    append_tape(file, stored_tape())
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n{json.dumps(change(json.loads(second)))}\n")

    reading = read_tapes(file)
    next(reading)
    with pytest.raises(TapeFileError, match=rf"tapes\.jsonl:2: {problem}"):
        next(reading)


@pytest.mark.parametrize("line", ["{", "[]", '"tape"', "\xff", "NaN"])
def test_a_line_that_is_no_tape_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "tapes.jsonl"
    file.write_text(line, encoding="latin-1")
    with pytest.raises(TapeFileError, match=r"tapes\.jsonl:1: not"):
        list(read_tapes(file))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TapeFileError, match=r"cannot read .*none\.jsonl: No such file"):
        list(read_tapes(tmp_path / "none.jsonl"))


@settings(max_examples=50)
@given(tapes())
def test_a_tape_makes_a_script(entries: list[Entry]) -> None:
    made = json.loads(json.dumps(to_script(entries, MODEL)))
    script = Script.model_validate_json(json.dumps(made))
    assert len(script.calls) == sum(entry.HasField("call_started") for entry in entries)
    sampled = [entry.tokens_sampled for entry in entries if entry.HasField("tokens_sampled")]
    steps = [step for call in script.calls for step in call.steps if step.token_ids]
    assert sorted(step.token_ids for step in steps) == sorted(tuple(run.token_ids) for run in sampled)


def test_an_unsealed_tape_makes_no_script() -> None:
    with pytest.raises(TapeInconsistent, match="not sealed"):
        to_script(stored_tape().entries[:-1], MODEL)
