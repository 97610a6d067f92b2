"""`--agent FILE.py:CLASS` and `MODULE:CLASS`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokentape_executor.cli.agents import load_agent
from tokentape_executor.errors import ExecutorError

HEAD = "from tokentape_executor.executor import TapeExecutor\n"
AGENT = (
    HEAD
    + "import cli_helper\nclass Mine(TapeExecutor):\n    async def run(self, task, client): return cli_helper.REWARD\n"
)


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """Forget what a test imports."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    sys.path[:] = path


def test_a_class_of_a_file_or_a_module_with_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_agent.py").write_text(AGENT)
    (tmp_path / "cli_helper.py").write_text("REWARD = 1.0\n")
    monkeypatch.chdir(tmp_path)
    assert load_agent(f"{tmp_path / 'cli_agent.py'}:Mine").__name__ == "Mine"
    assert load_agent("cli_agent:Mine").__module__ == "cli_agent"


@pytest.mark.parametrize(
    ("code", "name", "problem"),
    [
        (None, "{file}:Mine", r"cannot be imported: FileNotFoundError: there is no file"),
        (None, "cli_no_such_module:Mine", "cannot be imported: ModuleNotFoundError: No module named"),
        ("x = 1\nx.y\n", "{file}:Mine", r"agent\.py:2: AttributeError"),
        ("def f(:\n", "{file}:Mine", r"cannot be imported: (?s:.*)SyntaxError"),
        (HEAD, "{file}:Mine", "Mine is not there"),
        ("class Mine: pass\n", "{file}:Mine", r"Mine is no class that extends .*TapeExecutor"),
        (HEAD + "class Mine(TapeExecutor): pass\n", "{file}:Mine", "Mine does not define run"),
        (
            HEAD + "class Mine(TapeExecutor):\n    def __init__(self, policy, tools): ...\n"
            "    async def run(self, task, client): ...\n",
            "{file}:Mine",
            "__init__ must take what TapeExecutor's takes: ",
        ),
    ],
)
def test_what_is_no_agent_is_told(tmp_path: Path, code: str | None, name: str, problem: str) -> None:
    file = tmp_path / "agent.py"
    if code is not None:
        file.write_text(code)
    with pytest.raises(ExecutorError, match=f"--agent (?s:.)*{problem}"):
        load_agent(name.format(file=file))
