from __future__ import annotations

from pathlib import Path

import pytest

from tokentape_bridge.settings import parse_settings


def test_defaults() -> None:
    settings = parse_settings(["--sidecar", "a=127.0.0.1:50051"])
    assert dict(settings.sidecars) == {"a": "127.0.0.1:50051"}
    assert str(settings.listen) == "127.0.0.1:8000"
    assert (settings.ready_file, settings.log_level) == (None, "info")
    http = settings.http
    assert (http.api_key_file, http.max_request_bytes, http.workers, http.grace_seconds) == (None, 2**26, 1, 30)


def test_everything() -> None:
    settings = parse_settings(
        ["--sidecar", "a=h:1", "--sidecar", "b-2=unix:/run/b=2", "--listen", "[::1]:0", "--ready-file", "r"]
    )
    assert dict(settings.sidecars) == {"a": "h:1", "b-2": "unix:/run/b=2"}
    assert str(settings.listen) == "[::1]:0"
    assert settings.ready_file == Path("r")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "--sidecar"),
        (["--sidecar", "127.0.0.1:50051"], "NAME=ADDRESS"),
        (["--sidecar", "a.b=127.0.0.1:50051"], "NAME=ADDRESS"),
        (["--sidecar", "a="], "NAME=ADDRESS"),
        (["--sidecar", "a=x:1", "--sidecar", "a=x:2"], "same name"),
        (["--sidecar", "a=x:1", "--listen", "8000"], "HOST:PORT"),
        (["--sidecar", "a=x:1", "--workers", "0"], "--workers"),
        (["--sidecar", "a=x:1", "--max-request-bytes", "64MiB"], "--max-request-bytes"),
        (["--sidecar", "a=x:1", "--grace-seconds", "-1"], "--grace-seconds"),
        (["--sidecar", "a=x:1", "--grace-seconds", "nan"], "--grace-seconds"),
    ],
)
def test_bad_ones_end_with_a_reason(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(arguments)
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--help"])
    assert "curl -s http://127.0.0.1:8000/v1/chat/completions" in capsys.readouterr().out
