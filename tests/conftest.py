"""What all tests share, and the account of those that ran on real vLLM and real NeMo Gym.

A test is real if it is in `tests/real` or carries `@pytest.mark.real`. Every run that has such tests ends by naming
them, and, alone on its line, `real: N passed`. Under `--require-real` (what `make test` passes) the run fails unless
there are real tests and each of them ran: skipped, deselected or never reached counts against it. The account is that
of one process: pytest-xdist's `-n`, which is for the other tests, is refused under `--require-real`.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# Timings are for bench/; a loaded machine must not make a property false.
settings.register_profile("tokentape", deadline=None)
settings.load_profile("tokentape")

HERE = Path(__file__).parent
REAL_TIMEOUT_SECONDS = 300
"""For real tests that do not set their own; an engine takes half a minute to start."""

pytest_plugins = ["pytester"]

Outcomes = dict[str, str]
"""Node id of each real test to "passed", "failed", "skipped" or "not run"."""

_outcomes = pytest.StashKey[Outcomes]()


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root directory of this checkout."""
    return HERE.parent


@pytest.fixture(scope="session")
def model_directory(checkout: Path) -> Path:
    """The checkpoint of SmolLM2-135M-Instruct; built first (20 s) if it is not there."""
    from tokentape_executor.demo.model import build_model  # noqa: PLC0415 (the account must not need what it accounts for)

    return build_model(checkout / ".cache" / "SmolLM2-135M-Instruct")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-real", action="store_true", help="fail unless real tests exist and every one of them ran"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Ignored in what a shell starts in the background, and then in all that tests start, who send it to them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("require_real") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--require-real: counts the tests of one process; run it without -n")
    config.stash[_outcomes] = {}


@pytest.hookimpl(tryfirst=True)  # before -k and -m take tests away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE / "real"):
            item.add_marker(pytest.mark.real)
        if item.get_closest_marker("real"):
            config.stash[_outcomes][item.nodeid] = "not run"
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(REAL_TIMEOUT_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    outcomes = item.config.stash[_outcomes]
    # A test's call says how it went; set-up and tear-down matter only where they end otherwise than well.
    if item.nodeid in outcomes and (report.when == "call" or not report.passed) and outcomes[item.nodeid] != "failed":
        outcomes[item.nodeid] = report.outcome
    return report


def _complaint(config: pytest.Config) -> str:
    """What `--require-real` has against this run; empty: nothing."""
    outcomes = config.stash[_outcomes]
    if not config.getoption("require_real"):
        return ""
    if not outcomes:
        return "--require-real: there are no real tests"
    missing = sum(outcome in {"skipped", "not run"} for outcome in outcomes.values())
    return f"--require-real: {missing} of {len(outcomes)} real tests did not run" if missing else ""


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    ended_well = exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    if ended_well and not session.config.option.collectonly and _complaint(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)  # after --durations
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outcomes = config.stash[_outcomes]
    if config.option.collectonly or not (outcomes or config.getoption("require_real")):
        return
    counts = Counter(outcomes.values())
    terminalreporter.section("tests on real vLLM and real NeMo Gym")
    for nodeid, outcome in outcomes.items():
        terminalreporter.line(f"{outcome.upper():8} {nodeid}", green=outcome == "passed", red=outcome != "passed")
    rest = "".join(f", {counts[outcome]} {outcome}" for outcome in ("failed", "skipped", "not run") if counts[outcome])
    terminalreporter.line(f"real: {counts['passed']} passed{rest}", bold=True)
    if complaint := _complaint(config):
        terminalreporter.line(complaint, red=True)
