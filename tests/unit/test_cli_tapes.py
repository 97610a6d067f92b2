"""`tokentape-rollout`, as far as it needs no engine; `tests/real/test_oracle.py` verifies what one sampled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.tape_model import ModelCall, Token, tape_of
from tokentape.v1 import generation_pb2, types_pb2
from tokentape_executor.cli.main import main
from tokentape_executor.tape_file import StoredTape, append_tape
from tokentape_sidecar.script import Script

pytestmark = [
    # torch's and transformers' own, on import; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


PROCESSED = generation_pb2.LOGPROBS_MODE_PROCESSED


def run(*ids: int, version: str = "1", stale: bool = False) -> tuple[Token, ...]:
    return tuple(Token(token_id, -1.0, version, stale=stale) for token_id in ids)


def tape_file(
    directory: Path, *tapes: list[ModelCall], mode: generation_pb2.LogprobsMode.ValueType = PROCESSED
) -> Path:
    file = directory / "tapes.jsonl"
    model = generation_pb2.GetModelResponse(
        name="toy", max_context_tokens=64, vocabulary_size=1000, eos_token_ids=[2], logprobs_mode=mode
    )
    for index, calls in enumerate(tapes):
        append_tape(file, StoredTape.of(f"main.{index}", model, tape_of(*calls)))
    return file


ONE = [ModelCall((100, 101), (run(200, 201),), cause=types_pb2.SPLIT_CAUSE_NEW_CONVERSATION)]
TWO = [ModelCall((100, 101), (run(200, 201, version="2"),)), ModelCall((102,), (run(300),), (0, 0, 2))]


def verify(file: Path, model: Path, *more: str) -> int:
    return main(["--verify", str(file), "--model", str(model), *more])


def test_what_is_beyond_tolerance_is_shown_and_is_status_1(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tape_file(tmp_path, ONE, ONE)
    assert verify(file, model_directory) == 1
    output = capsys.readouterr().out
    assert "new_conversation" in output
    assert "tape 1, sample 0, position 2: the recorded log-probability is" in output

    assert verify(file, model_directory, "--tolerance", "100", "--mean-tolerance", "100", "--dtype", "float32") == 0
    assert "position 2" not in capsys.readouterr().out


def test_what_is_refused_is_status_1_unless_it_may_be_skipped(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = [ModelCall((1,), (run(5) + run(6, stale=True),))]
    file = tape_file(tmp_path, stale)
    lenient = ("--tolerance", "100", "--mean-tolerance", "100")
    assert verify(file, model_directory, *lenient) == 1
    assert "sample 0, positions 2 to 2: sampled on a cache of earlier weights; not compared" in capsys.readouterr().out
    assert verify(file, model_directory, *lenient, "--skip-refused") == 0

    assert verify(file, model_directory, *lenient, "--skip-refused", "--weight-version", "7") == 1
    assert "no token could be compared" in capsys.readouterr().out


def test_several_weight_versions_need_a_word(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(tape_file(tmp_path, ONE, TWO), model_directory) == 2
    assert "weight versions ['1', '2']: say with --weight-version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--verify", "{tapes}", "--model", "{directory}/none"], "--model: there is no directory .*none"),
        (["--verify", "{directory}/none.jsonl", "--model", "{directory}"], r"cannot read .*none\.jsonl"),
        (["--script", "{tapes}", "--tape", "1"], r"--tape 1: .*tapes\.jsonl has 1 tapes, counted from 0"),
        (["--script", "{tapes}", "--tape", "-1"], "--tape -1: "),
        (["--script", "{tapes}", "-o", "{directory}/none/script.json"], "No such file"),
    ],
)
def test_what_cannot_be_used_is_named_and_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    file = tape_file(tmp_path, ONE)
    told = [argument.format(tapes=file, directory=tmp_path) for argument in arguments]
    assert main(told) == 2
    error = capsys.readouterr().err
    assert error.startswith("tokentape-rollout: ")
    assert re.search(problem, error), error


def test_a_tape_that_does_not_say_its_mode_cannot_be_verified(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(tape_file(tmp_path, ONE, mode=generation_pb2.LOGPROBS_MODE_UNSPECIFIED), model_directory) == 2
    assert "(logprobs_mode)" in capsys.readouterr().err


def test_a_script_goes_to_standard_output_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tape_file(tmp_path, ONE, TWO)
    assert main(["--script", str(file), "--tape", "1"]) == 0
    printed = capsys.readouterr().out
    assert main(["--script", str(file), "--tape", "1", "-o", str(tmp_path / "script.json")]) == 0
    assert (tmp_path / "script.json").read_text() == printed
    script = Script.load(tmp_path / "script.json")
    assert [call.expect and call.expect.prompt_token_ids for call in script.calls] == [
        (100, 101),
        (100, 101, 200, 201, 102),
    ]


@pytest.mark.parametrize("arguments", [[], ["--verify", "tapes.jsonl"], ["--verify", "a", "--script", "b"]])
def test_a_wrong_command_line_is_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_the_console_script_explains_itself() -> None:
    code = "from tokentape.console import rollout; rollout()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    for word in ("--verify", "--skip-refused", "examples:", "--engine scripted"):
        assert word in ended.stdout


def test_help_and_scripts_need_no_torch() -> None:
    code = (
        "import sys; import tokentape_executor.cli.main; "
        "sys.exit(bool({'torch', 'transformers', 'vllm', 'xgrammar'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_json_is_what_the_sidecar_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--script", str(tape_file(tmp_path, ONE))]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["eos_token_ids"] == [2]
