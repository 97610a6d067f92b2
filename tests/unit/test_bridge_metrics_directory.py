"""The directory of the workers' metrics: removed by whoever made it, or, when that was killed, by the next bridge."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from tokentape_bridge.metrics_directory import metrics_directory


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_this_users_alone_and_goes_in_the_end(temporary: Path) -> None:
    with metrics_directory() as made:
        (made.path / "counter_1.db").write_bytes(b"1")
        assert made.path.stat().st_mode & 0o777 == 0o700
        assert made.path.parent == temporary
    assert list(temporary.iterdir()) == []


def test_what_a_killed_bridge_left_goes_when_another_starts_and_what_one_uses_stays(temporary: Path) -> None:
    left = Path(tempfile.mkdtemp(prefix="tokentape-bridge-metrics-"))
    (left / "counter_1.db").write_bytes(b"1")
    (temporary / "tokentape-other").mkdir()
    with metrics_directory() as used:
        assert not left.exists()
        with metrics_directory():
            assert used.path.exists()
    assert [path.name for path in temporary.iterdir()] == ["tokentape-other"]


def test_a_worker_that_has_the_descriptor_keeps_it(temporary: Path) -> None:
    used = Path(tempfile.mkdtemp(prefix="tokentape-bridge-metrics-"))
    parents = os.open(used, os.O_RDONLY)
    fcntl.flock(parents, fcntl.LOCK_EX)
    workers = os.dup(parents)
    os.close(parents)
    with metrics_directory():
        assert used.exists()
    os.close(workers)
    with metrics_directory():
        assert not used.exists()


def test_a_link_is_not_followed(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / "tokentape-bridge-metrics-link").symlink_to(elsewhere)
    with metrics_directory():
        pass
    assert elsewhere.exists()
