"""What is not served: addresses that others can reach, without what tells who is there."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tokentape.access import Access, access_from, access_options, add_access_options
from tokentape_bridge import settings as bridge
from tokentape_executor.errors import StartFailed
from tokentape_executor.node import NodeSpec
from tokentape_executor.settings import ExecutorSettings
from tokentape_sidecar import settings as sidecar

Parse = Callable[[Sequence[str]], object]


def parse_sidecar(options: Sequence[str]) -> sidecar.Settings:
    return sidecar.parse_settings(["--engine", "scripted", "--script", "s", "--tokenizer", "t", *options])


def parse_bridge(options: Sequence[str]) -> bridge.Settings:
    return bridge.parse_settings(["--sidecar", "main=127.0.0.1:1", *options])


TLS = ["--tls-certificate", "c", "--tls-key", "k"]

REFUSED: list[tuple[Parse, list[str], str]] = [
    (parse_sidecar, ["--listen", "0.0.0.0:0"], "--tls-certificate and --tls-key and --token-file"),
    (parse_sidecar, ["--listen", "[::]:0"], "--tls-certificate and --tls-key and --token-file"),
    (parse_sidecar, ["--listen", "trainer:0", "--token-file", "t"], "it needs --tls-certificate and --tls-key"),
    (parse_sidecar, ["--listen", "10.0.0.7:0", *TLS], "it needs --token-file"),
    (parse_sidecar, ["--control", "0.0.0.0:0", "--control-token-file", "t"], "it needs --tls-certificate"),
    (parse_sidecar, ["--control", "127.0.0.1:0"], "--control-token-file"),
    (
        parse_sidecar,
        ["--control", "127.0.0.1:0", "--token-file", "./t", "--control-token-file", "t"],
        "another file than --token-file",
    ),
    (parse_bridge, ["--listen", "0.0.0.0:0"], "--tls-certificate and --tls-key and --api-key-file"),
    (parse_bridge, ["--listen", "trainer:0", "--api-key-file", "k"], "it needs --tls-certificate and --tls-key"),
    (parse_bridge, ["--listen", "[2001:db8::1]:0", *TLS], "it needs --api-key-file"),
    (parse_bridge, ["--tls-key", "k"], "--tls-certificate and --tls-key go together"),
    (parse_bridge, ["--tls-client-ca", "a"], "--tls-client-ca needs"),
    (parse_bridge, ["--sidecar-key", "k"], "--sidecar-certificate and --sidecar-key go together"),
    (parse_bridge, ["--sidecar-certificate", "c", "--sidecar-key", "k"], "needs --sidecar-ca"),
]


@pytest.mark.parametrize(("parse", "options", "problem"), REFUSED, ids=[" ".join(case[1]) for case in REFUSED])
def test_what_is_not_guarded_is_refused(
    parse: Parse, options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(options)
    assert ended.value.code == 2
    assert problem in " ".join(capsys.readouterr().err.split())


ALLOWED: list[tuple[Parse, list[str]]] = [
    (parse_sidecar, ["--listen", "127.0.0.9:0"]),
    (parse_sidecar, ["--listen", "[::1]:0"]),
    (parse_sidecar, ["--listen", "localhost:0"]),
    (parse_sidecar, ["--listen", "unix:/run/s"]),
    (parse_sidecar, ["--listen", "0.0.0.0:0", "--token-file", "t", *TLS]),
    (parse_sidecar, ["--control", "0.0.0.0:0", "--control-token-file", "t", *TLS]),
    (parse_bridge, ["--listen", "127.0.0.1:0"]),
    (parse_bridge, ["--listen", "0.0.0.0:0", "--api-key-file", "k", *TLS]),
]


@pytest.mark.parametrize(("parse", "options"), ALLOWED, ids=[" ".join(case[1]) for case in ALLOWED])
def test_what_is_guarded_or_out_of_reach_is_served(parse: Parse, options: list[str]) -> None:
    parse(options)


def test_by_default_only_this_machine_is_served() -> None:
    assert not parse_sidecar([]).data.address.is_public
    assert not parse_bridge([]).listen.is_public
    at_the_root = parse_sidecar(["--control", "unix:/"]).control
    assert at_the_root is not None
    assert str(at_the_root.address) == "unix:/"
    control = parse_sidecar(["--control"]).control
    assert control is not None
    assert str(control.address).startswith("unix:")


def test_a_unix_socket_has_no_tls() -> None:
    settings = parse_sidecar(["--listen", "unix:/run/s", "--control", *TLS])
    assert settings.data.tls is None
    assert settings.control is not None
    assert settings.control.tls is None


@pytest.mark.parametrize("option", ["--api-key-file=k", "--tls-certificate"])
def test_a_nodes_bridge_is_on_loopback_and_plain(option: str) -> None:
    with pytest.raises(StartFailed, match=f"TOKENTAPE_BRIDGE_OPTIONS: {option.partition('=')[0]}: a node's bridge"):
        NodeSpec.from_settings(ExecutorSettings(bridge_options=(option,)), group="g", policy_model_name=None)


def test_access_travels_as_the_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the keeper in its spec, to the bridge in its options: the same, from another working directory."""
    monkeypatch.chdir(tmp_path)
    access = Access(Path("token"), Path("ca"), Path("certificate"), Path("key"))
    spec = NodeSpec.from_settings(ExecutorSettings(), group="g", policy_model_name=None, access=access)
    parser = argparse.ArgumentParser()
    add_access_options(parser)
    read = access_from(parser.parse_args(access_options(NodeSpec.from_json(spec.to_json()).access)), parser)
    assert read == access.absolute()
    assert read.token_file == tmp_path / "token"
