"""What tests on a real engine share."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from support.real_engine import AdapterPath, RealEngine, load_engine, shut_down


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(model_directory: Path) -> AsyncGenerator[RealEngine]:
    """One for all modules that leave it as it was: its start takes half a minute. They need its loop, the session's."""
    llm = load_engine(model_directory)
    yield RealEngine(llm, model_directory)
    await shut_down(llm)


@pytest.fixture(params=["direct", "public"])
def path(request: pytest.FixtureRequest) -> AdapterPath:
    """Both ways from the adapter into vLLM."""
    return request.param
