"""The account of real tests that `tests/conftest.py` keeps, run on small suites of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

INI = """
[pytest]
markers = real
addopts = --strict-markers --import-mode=importlib
asyncio_default_fixture_loop_scope = function
"""
PASSES = "def test_ok(): pass\n"
SKIPS = "import pytest\ndef test_no(): pytest.skip('no GPU')\n"
FAILS = "def test_bad(): assert False\n"
BREAKS_DOWN = """
import pytest
@pytest.fixture
def engine():
    yield
    raise RuntimeError('left a process')
def test_used(engine): pass
"""


class Suite:
    """A suite in a directory of its own, under this project's conftest."""

    def __init__(self, pytester: pytest.Pytester, checkout: Path) -> None:
        self._pytester = pytester
        pytester.makeconftest((checkout / "tests" / "conftest.py").read_text())
        pytester.makeini(INI)
        pytester.mkdir("real")

    def add(self, **files: str) -> Suite:
        for name, text in files.items():
            (self._pytester.path / name.replace("__", "/")).with_suffix(".py").write_text(text)
        return self

    def run(self, *options: str) -> pytest.RunResult:
        # In a process of its own: a conftest of the same name is loaded in this one.
        return self._pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)


@pytest.fixture
def suite(pytester: pytest.Pytester, checkout: Path) -> Suite:
    return Suite(pytester, checkout)


def test_names_every_real_test_and_counts_them(suite: Suite) -> None:
    result = suite.add(real__test_engine=PASSES, real__test_gym=PASSES, test_small=PASSES).run("--require-real")

    result.stdout.fnmatch_lines(
        [
            "*tests on real vLLM and real NeMo Gym*",
            "PASSED   real/test_engine.py::test_ok",
            "PASSED   real/test_gym.py::test_ok",
            "real: 2 passed",
        ]
    )
    result.stdout.no_fnmatch_line("PASSED*test_small*")
    assert result.ret == pytest.ExitCode.OK


def test_a_mark_makes_a_test_real_anywhere(suite: Suite) -> None:
    result = suite.add(test_marked="import pytest\n@pytest.mark.real\n" + PASSES).run()

    result.stdout.fnmatch_lines(["PASSED   test_marked.py::test_ok", "real: 1 passed"])


def test_a_failure_is_counted(suite: Suite) -> None:
    result = suite.add(real__test_engine=PASSES, real__test_gym=FAILS).run("--require-real")

    result.stdout.fnmatch_lines(["FAILED   real/test_gym.py::test_bad", "real: 1 passed, 1 failed"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_failing_tear_down_is_a_failure(suite: Suite) -> None:
    result = suite.add(real__test_engine=BREAKS_DOWN).run("--require-real")

    result.stdout.fnmatch_lines(["real: 0 passed, 1 failed"])


@pytest.mark.parametrize(
    ("files", "options", "line"),
    [
        ({"real__test_engine": PASSES, "real__test_gym": SKIPS}, [], "real: 1 passed, 1 skipped"),
        ({"real__test_engine": PASSES, "real__test_gym": PASSES}, ["-k", "engine"], "real: 1 passed, 1 not run"),
        ({"real__test_engine": PASSES, "test_small": PASSES}, ["-m", "not real"], "real: 0 passed, 1 not run"),
        ({"test_small": PASSES}, [], "real: 0 passed"),
    ],
    ids=["skipped", "deselected", "none-selected", "none-exist"],
)
def test_require_real_fails_where_a_real_test_did_not_run(
    suite: Suite, files: dict[str, str], options: list[str], line: str
) -> None:
    result = suite.add(**files).run("--require-real", *options)

    result.stdout.fnmatch_lines([line, "--require-real: *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_without_the_option_a_skipped_real_test_is_only_named(suite: Suite) -> None:
    result = suite.add(real__test_gym=SKIPS).run()

    result.stdout.fnmatch_lines(["SKIPPED  real/test_gym.py::test_no", "real: 0 passed, 1 skipped"])
    assert result.ret == pytest.ExitCode.OK


def test_a_run_without_real_tests_says_nothing_of_them(suite: Suite) -> None:
    result = suite.add(test_small=PASSES).run()

    result.stdout.no_fnmatch_line("*real*:*passed*")
    assert result.ret == pytest.ExitCode.OK


def test_workers_leave_real_tests_out_and_are_refused_where_each_must_run(suite: Suite) -> None:
    suite.add(real__test_engine=FAILS, test_small=PASSES)
    result = suite.run("-n", "1", "-m", "not real")

    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.OK
    result = suite.run("-n", "1", "--require-real")
    result.stderr.fnmatch_lines(["*--require-real: * run it without -n"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
