"""The examples of the components' READMEs that need no model, pasted. tests/real/test_readme.py has the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.curls import assert_same_calls, told_with
from support.readme import Reader, blocks, free_port

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def reader(checkout: Path, model_directory: Path, tmp_path: Path) -> Reader:
    assert model_directory.is_relative_to(checkout)
    return Reader(checkout, tmp_path, {50051: free_port(), 8000: free_port()})


def test_the_bridge_and_the_contract(checkout: Path, reader: Reader) -> None:
    (start,) = blocks(checkout / "bridge" / "README.md", "Try it", "sh")
    contract = checkout / "proto" / "README.md"
    calls = blocks(contract, "Look at one", "sh")
    assert len(assert_same_calls(*calls)) == 2
    clients = [f"python - <<'EOT'\n{client}EOT" for client in blocks(contract, "From Python", "python")]
    output = reader.paste(start, *told_with("buf", calls), *clients, seconds=100)

    assert '"content":"2 + 3 = 5"' in output
    assert re.search(r'"token_ids":\[[\d,]+,2\]', output)
    assert "tokentape.v1.TapeService/WatchTape" in output
    assert '"tokenIds"' in output
    assert "finish_reason: FINISH_REASON_STOP" in output
    assert len(re.findall(r"^\[\d+(?:, \d+)*\] \[-\d", output, re.MULTILINE)) == 6
