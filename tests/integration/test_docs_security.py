"""docs/security.md, pasted: from making certificates to replacing them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.curls import assert_same_calls, told_with
from support.readme import Reader, blocks, free_port

pytestmark = pytest.mark.timeout(300)

SECTIONS = ["Certificates and tokens", "Start", "Call", "Rollouts", "Replace a token", "Replace a certificate"]


@pytest.fixture
def page(checkout: Path) -> Path:
    return checkout / "docs" / "security.md"


def test_both_tools_are_told_the_same_calls(page: Path) -> None:
    (call,) = assert_same_calls(*blocks(page, "Call", "sh"))
    assert call.tls
    assert call.headers == ("authorization: Bearer $TOKEN",)
    assert [name for name, _ in call.files] == ["cacert", "cert", "key"]


def test_no_section_is_left_out(page: Path) -> None:
    headings = [line.removeprefix("## ") for line in page.read_text().splitlines() if line.startswith("## ")]
    assert headings == SECTIONS


def test_the_page(page: Path, checkout: Path, model_directory: Path, tmp_path: Path) -> None:
    assert model_directory.is_relative_to(checkout)
    reader = Reader(checkout, tmp_path, {50051: free_port(), 8000: free_port()})
    shell = {section: told_with("buf", blocks(page, section, "sh")) for section in SECTIONS}
    (client,) = blocks(page, "Call", "python")
    call_again = shell["Call"]
    output = reader.paste(
        *shell["Certificates and tokens"],
        *shell["Start"],
        *shell["Call"],
        f"python - <<'EOT'\n{client}EOT",
        *shell["Rollouts"],
        *shell["Replace a token"],
        *call_again,
        *shell["Replace a certificate"],
        *call_again,
        seconds=280,
    )
    # Before and after the replacements, the token of each time.
    assert output.count('"logprobsMode"') == 3
    assert output.count('"token_ids":[7042,28,282,1740,30,2]') == 3
    assert " Paris, of course" in output
    assert "reward 1.0" in output
    assert '"SERVING"' in output
    (row,) = [json.loads(line) for line in (reader.directory / "out/guarded.jsonl").read_text().splitlines()]
    assert (row["status"], row["reward"]) == ("completed", 1.0)
    for name in ("sidecar.token", "control.token", "bridge.key"):
        assert (reader.directory / "out" / "guard" / name).stat().st_mode & 0o077 == 0
        assert (reader.directory / "out" / "guard" / name).read_text().strip() not in output
