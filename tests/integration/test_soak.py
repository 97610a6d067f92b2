"""The soak itself, for some seconds: it runs, and it finds nothing open and no token lost."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)


async def test_a_short_soak(checkout: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.soak", "--rollouts", "40", "--seconds", "3",
        cwd=checkout, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    assert "WRONG" not in output
    checked = re.search(r"tokens checked\D*([\d,]+)", output)
    assert checked is not None, output
    assert int(checked[1].replace(",", "")) > 100
