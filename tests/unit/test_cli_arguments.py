"""The command line of `tokentape-rollout` for prompts, and the prompts themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokentape_executor.cli.arguments import RunOptions, SamplingOptions, ScriptOptions, VerifyOptions, parse
from tokentape_executor.cli.main import main
from tokentape_executor.cli.prompts import as_it_is, for_gym, read_prompts
from tokentape_executor.cli.terms import differences, terms_of
from tokentape_executor.errors import ExecutorError
from tokentape_executor.settings import OnFailure

MODEL = ("p.jsonl", "-o", "r.jsonl", "--model", "m")
SIDECAR = ("p.jsonl", "-o", "r.jsonl", "--sidecar", "127.0.0.1:1")


def run_options(*arguments: str) -> RunOptions:
    options = parse(arguments)
    assert isinstance(options, RunOptions)
    return options


def test_a_running_sidecar_or_several() -> None:
    options = run_options(*SIDECAR, "--sidecar", "h:2", "--samples", "4", "--temperature", "0", "--agent", "a.b:C")
    assert options.sidecars == ("127.0.0.1:1", "h:2")
    assert (options.samples, options.concurrency, options.limit, options.agent) == (4, 32, None, "a.b:C")
    assert options.sampling == SamplingOptions(temperature=0.0)


def test_what_follows_the_dashes_is_vllms() -> None:
    options = run_options(*MODEL, "--max-tokens", "8", "--", "--dtype", "bfloat16", "-o", "x")
    assert options.model == "m"
    assert options.vllm_options == ("--dtype", "bfloat16", "-o", "x")
    assert options.output == Path("r.jsonl")


def test_options_go_before_the_settings_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENTAPE_RETRIES", "5")
    monkeypatch.setenv("TOKENTAPE_MAX_TURNS", "7")
    monkeypatch.setenv("TOKENTAPE_MAX_WEIGHT_CHANGES", "1")
    monkeypatch.setenv("TOKENTAPE_ON_FAILURE", "placeholder")
    settings = run_options(*MODEL).settings
    assert (settings.retries, settings.max_turns, settings.on_failure) == (5, 7, OnFailure.PLACEHOLDER)
    assert settings.max_weight_changes == 1
    told = ("--retries", "0", "--max-turns", "3", "--on-failure", "record", "--turn-timeout", "1.5", "--gym-agent", "g")
    settings = run_options(*MODEL, *told, "--max-weight-changes", "0").settings
    assert (settings.retries, settings.max_turns, settings.on_failure) == (0, 3, OnFailure.RAISE)
    assert settings.max_weight_changes == 0
    assert (settings.turn_timeout_seconds, settings.gym_agent) == (1.5, "g")


@pytest.mark.parametrize(("given", "taken"), [("http://h:1", "http://h:1/v1"), ("https://h/v1/", "https://h/v1")])
def test_a_bridge_is_an_openai_base_url(given: str, taken: str) -> None:
    assert run_options(*SIDECAR, "--agent", "a:B", "--bridge", given).bridge == taken


def test_the_key_of_a_bridge_is_the_first_of_its_file_and_is_not_shown(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    given = (*SIDECAR, "--agent", "a:B", "--bridge", "http://h:1")
    options = run_options(*given, "--bridge-key-file", str(keys))
    assert options.bridge_key == "first-key"
    assert "first-key" not in repr(options)
    assert run_options(*given).bridge_key == "none"


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "cannot be read"), (b"\n", "no key in it"), (b"\xff", "cannot be read")]
)
def test_a_key_file_that_will_not_do_is_told(
    content: bytes | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_bytes(content)
    with pytest.raises(SystemExit):
        parse([*SIDECAR, "--agent", "a:B", "--bridge", "http://h:1", "--bridge-key-file", str(keys)])
    assert re.search(rf"--bridge-key-file .*{problem}", capsys.readouterr().err)


def test_the_terms_are_what_decides_the_samples() -> None:
    given = ("p.jsonl", "-o", "r.jsonl", "--model", "m")
    terms = terms_of(run_options(*given))
    assert terms == terms_of(run_options(*given, "--concurrency", "3", "--retries", "0", "--samples", "9"))
    same = terms_of(run_options(*given, "--turn-timeout", "5", "--on-failure", "placeholder"))
    assert differences(terms, same) == ""
    other = terms_of(run_options(*given, "--max-tokens", "9", "--agent", "some/where/a.py:B"))
    assert "--max-tokens was left out and is now 9" in differences(terms, other)
    assert '--agent was "math" and is now "a.py:B"' in differences(terms, other)


def test_the_other_modes() -> None:
    assert isinstance(parse(["--verify", "t", "--model", "m"]), VerifyOptions)
    assert parse(["--script", "t", "-o", "o"]) == ScriptOptions(Path("t"), 0, Path("o"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("p.jsonl", "--model", "m"), "-o is needed"),
        (("p.jsonl", "-o", "r"), "give either --sidecar ADDRESS"),
        ((*MODEL, "--sidecar", "h:1"), "give either --sidecar ADDRESS"),
        (("p.jsonl", "--verify", "t", "--model", "m"), "give either a file of prompts, or"),
        (("p.jsonl", "-o", "./p.jsonl", "--model", "m"), "must be different files"),
        ((*MODEL, "--tapes", "r.jsonl"), "must be different files"),
        ((*SIDECAR, "--", "--dtype", "x"), "options after -- are vLLM's"),
        ((*SIDECAR, "--agent", "nemo"), "--agent: 'nemo' is neither math nor FILE.py:CLASS"),
        ((*SIDECAR, "--agent", "a.py:"), "--agent: 'a.py:' is neither"),
        ((*SIDECAR, "--bridge", "http://h"), "--bridge is for agents of your own"),
        ((*MODEL, "--agent", "a:B", "--bridge", "http://h"), "--bridge needs --sidecar"),
        ((*SIDECAR, "--agent", "a:B", "--bridge-key-file", "k"), "--bridge-key-file needs --bridge"),
        ((*SIDECAR, "--agent", "a:B", "--bridge", "h:1"), "argument --bridge: 'h:1' is not a URL"),
        ((*MODEL, "--samples", "0"), "argument --samples: '0' is not a whole number above 0"),
        ((*MODEL, "--retries", "-1"), "argument --retries: '-1' is not a whole number, 0 or more"),
        ((*MODEL, "--top-p", "1.5"), "argument --top-p: '1.5' is not a number, from 0 to 1"),
        ((*MODEL, "--temperature", "nan"), "argument --temperature: 'nan' is not a number, 0 or more"),
        ((*MODEL, "--temperature", "inf"), "argument --temperature: 'inf'"),
        ((*MODEL, "--rollout-timeout", "0"), "argument --rollout-timeout: '0' is not a number of seconds above 0"),
        ((*MODEL, "--sidecar", "nowhere"), "argument --sidecar: 'nowhere' is not HOST:PORT"),
        ((*MODEL, "--sample", "2"), "unrecognized arguments: --sample"),
    ],
)
def test_a_wrong_command_line_is_told_and_is_status_2(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert re.search(re.escape(problem), capsys.readouterr().err)


def test_a_wrong_variable_is_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENTAPE_RETRIES", "many")
    with pytest.raises(SystemExit):
        parse(MODEL)
    assert "TOKENTAPE_RETRIES: 'many' is not a number" in capsys.readouterr().err


def prompts_file(directory: Path, *lines: str) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_blank_lines_are_passed_over_and_rows_are_the_tasks(tmp_path: Path) -> None:
    path = prompts_file(tmp_path, '{"a":  1}', "", "   ", '{"a": "é"}')
    first, second = read_prompts(path, as_it_is)
    assert (first.index, first.task, first.text) == (0, {"a": 1}, '{"a": 1}')
    assert (second.index, second.task, second.text) == (1, {"a": "é"}, '{"a": "é"}')


def test_gyms_rows_are_taken_as_they_are_or_made_of_questions(tmp_path: Path) -> None:
    ready = '{"responses_create_params": {"input": []}, "agent_ref": {"name": "other"}}'
    path = prompts_file(tmp_path, ready, '{"question": "2+3?", "expected_answer": "5", "agent_ref": {"name": "x"}}')
    first, second = read_prompts(path, for_gym(SamplingOptions(temperature=0.5, max_tokens=9)))
    assert first.task == {"responses_create_params": {"input": []}, "agent_ref": {"name": "other"}}
    params = second.task["responses_create_params"]
    assert params["input"][0]["content"].endswith("\n\n2+3?")
    assert (params["temperature"], params["max_output_tokens"]) == (0.5, 9)
    assert (second.task["expected_answer"], second.task["agent_ref"]) == ("5", {"name": "x"})


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["{}", "", "{half"], "prompts.jsonl:3: not JSON"),
        (['{"a": 1}', "[1]"], r"prompts.jsonl:2: must be a JSON object, not '\[1\]'"),
        (['{"a": NaN}'], "prompts.jsonl:1: .*not JSON compliant"),
        ([r'{"a": "\ud800"}'], "prompts.jsonl:1: .*surrogates not allowed"),
        (["", " "], "prompts.jsonl: there is no prompt in it"),
    ],
)
def test_what_is_no_prompt_is_told_with_its_line(tmp_path: Path, lines: list[str], problem: str) -> None:
    with pytest.raises(ExecutorError, match=problem):
        read_prompts(prompts_file(tmp_path, *lines), as_it_is)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"expected_answer": "5"}', ":1: question: must be a string; NeMo Gym's rows have"),
        ('{"question": "2+3", "expected_answer": 5}', ":1: expected_answer: must be a string"),
        ('{"responses_create_params": null}', ":1: responses_create_params: must be an object"),
    ],
)
def test_what_is_no_row_of_gyms_is_told_before_anything_starts(
    tmp_path: Path, line: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prompts_file(tmp_path, line)
    assert main([str(path), "-o", str(tmp_path / "r.jsonl"), "--sidecar", "127.0.0.1:1"]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "r.jsonl").exists()


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match=r"cannot read .*none: No such file"):
        read_prompts(tmp_path / "none", as_it_is)
