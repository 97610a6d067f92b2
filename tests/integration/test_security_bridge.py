"""The bridge between two guards: how it gets into sidecars, and who gets into it."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from support.bridged import RunningBridge, answering_engine, bridge_process
from support.certificates import Authority, CertificateFiles, secret_file
from support.guarded import guarded_sidecar
from support.waiting import eventually
from tokentape_sidecar.limits import Limits

pytestmark = pytest.mark.timeout(120)

KEY, TOKEN = "the-bridges-key", "the-data-token"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


def trusting(ca_file: Path, own: CertificateFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca_file))
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


async def test_a_bridge_gets_in_by_a_token_and_a_certificate(
    authority: Authority, tmp_path: Path, model_directory: Path
) -> None:
    clients, file = Authority(tmp_path / "clients"), secret_file(tmp_path / "token", TOKEN)
    own = clients.sign("bridge")
    access = [
        *("--sidecar-token-file", str(file), "--sidecar-ca", str(authority.ca_file)),
        *("--sidecar-certificate", str(own.certificate), "--sidecar-key", str(own.key)),
    ]
    async with (
        guarded_sidecar(
            answering_engine(model_directory), token_file=file, tls=authority.serve(clients=clients)
        ) as sidecar,
        bridge_process(tmp_path, *access, sidecar=sidecar.address) as bridge,
    ):
        assert (await bridge.chat(return_token_ids=True)).json()["choices"][0]["token_ids"] == [34, 35, 2]


async def test_a_bridge_that_a_sidecar_does_not_let_in_says_so_until_it_does(
    tmp_path: Path, model_directory: Path
) -> None:
    file, own = secret_file(tmp_path / "token", TOKEN), secret_file(tmp_path / "own", "another")
    async with (
        guarded_sidecar(answering_engine(model_directory), token_file=file) as sidecar,
        bridge_process(tmp_path, "--sidecar-token-file", str(own), sidecar=sidecar.address, healthy=False) as bridge,
    ):
        await bridge.until_state("does not let this bridge in (--sidecar-token-file)")
        refused = await bridge.chat()
        assert refused.status_code == 503
        assert "does not let the bridge in" in refused.json()["error"]["message"]
        secret_file(own, TOKEN)
        await bridge.until_state("SERVING")
        assert (await bridge.chat()).status_code == 200
        assert TOKEN not in bridge.process.log


async def test_a_token_is_changed_under_a_bridge_while_an_answer_is_sampled(
    tmp_path: Path, model_directory: Path
) -> None:
    """What runs lives on; a bridge that has the new token too late answers 503 until it has."""
    file, own = secret_file(tmp_path / "token", TOKEN), secret_file(tmp_path / "own", TOKEN)
    engine = answering_engine(
        model_directory, {"token_ids": [34]}, {"token_ids": [35, 2], "delay_ms": 3000, "finish_reason": "stop"}
    )
    async with (
        guarded_sidecar(engine, token_file=file) as sidecar,
        bridge_process(tmp_path, "--sidecar-token-file", str(own), sidecar=sidecar.address) as bridge,
    ):
        running = asyncio.create_task(bridge.chat(return_token_ids=True))
        await eventually(lambda: sidecar.running_call_count == 1)
        secret_file(file, "the-next-token")
        refused = await bridge.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sidecar_unavailable")
        assert sidecar.running_call_count == 1
        secret_file(own, "the-next-token")
        assert (await bridge.chat()).status_code == 200
        assert (await running).json()["choices"][0]["token_ids"] == [34, 35, 2]


async def test_a_token_does_not_go_to_a_public_address_that_a_file_names(tmp_path: Path, model_directory: Path) -> None:
    file, table = secret_file(tmp_path / "token", TOKEN), tmp_path / "sidecars.json"
    table.write_text(json.dumps({"far": "trainer:50051"}))
    options = ["--sidecar-token-file", str(file), "--sidecar-file", str(table)]
    async with (
        guarded_sidecar(answering_engine(model_directory), token_file=file) as sidecar,
        bridge_process(tmp_path, *options, sidecar=sidecar.address) as bridge,
    ):
        assert (await bridge.http.get("/health")).json()["sidecars"] == {"main": "SERVING"}
        assert "trainer:50051: the token of --sidecar-token-file would go there in the clear" in bridge.process.log


@pytest.mark.parametrize("workers", [1, 2])
async def test_https_and_a_key(authority: Authority, tmp_path: Path, model_directory: Path, workers: int) -> None:
    files, keys = authority.sign(), secret_file(tmp_path / "keys", KEY)
    options = [
        *("--tls-certificate", str(files.certificate), "--tls-key", str(files.key)),
        *("--api-key-file", str(keys), "--workers", str(workers)),
    ]
    context = trusting(authority.ca_file)
    async with (
        guarded_sidecar(answering_engine(model_directory)) as sidecar,
        bridge_process(tmp_path, *options, sidecar=sidecar.address, key=KEY, tls=context) as bridge,
    ):
        assert (await bridge.chat()).status_code == 200
        async with httpx.AsyncClient(base_url=bridge.http.base_url, verify=context, trust_env=False) as stranger:
            assert (await stranger.post("/v1/chat/completions", json={})).status_code == 401
        async with httpx.AsyncClient(base_url=bridge.http.base_url, trust_env=False) as unbelieving:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await unbelieving.get("/health")
        plain = str(bridge.http.base_url).replace("https", "http")
        async with httpx.AsyncClient(base_url=plain, trust_env=False) as in_the_clear:
            with pytest.raises(httpx.TransportError):
                await in_the_clear.get("/health")
        assert (await bridge.chat()).status_code == 200


@pytest.fixture
async def mutual(
    authority: Authority, tmp_path: Path, model_directory: Path
) -> AsyncGenerator[tuple[RunningBridge, Authority, CertificateFiles]]:
    """A bridge that asks for certificates, the authority of its clients', and its own."""
    clients, files = Authority(tmp_path / "clients"), authority.sign()
    options = [
        *("--tls-certificate", str(files.certificate), "--tls-key", str(files.key)),
        *("--tls-client-ca", str(clients.ca_file)),
    ]
    context = trusting(authority.ca_file, clients.sign("agent"))
    async with (
        guarded_sidecar(answering_engine(model_directory)) as sidecar,
        bridge_process(tmp_path, *options, sidecar=sidecar.address, tls=context) as bridge,
    ):
        yield bridge, clients, files


async def test_mutual_tls_at_the_bridge(
    mutual: tuple[RunningBridge, Authority, CertificateFiles], authority: Authority, tmp_path: Path
) -> None:
    bridge, _, _ = mutual
    assert (await bridge.chat()).status_code == 200
    for own in (None, Authority(tmp_path / "others").sign("agent")):
        async with httpx.AsyncClient(
            base_url=bridge.http.base_url, verify=trusting(authority.ca_file, own), trust_env=False
        ) as stranger:
            with pytest.raises(httpx.TransportError):
                await stranger.get("/version")


async def test_a_renewed_certificate_is_served_by_the_bridge(
    mutual: tuple[RunningBridge, Authority, CertificateFiles], tmp_path: Path
) -> None:
    bridge, clients, files = mutual
    renewed = Authority(tmp_path / "renewed")
    files.become(renewed.sign())
    own = clients.sign("agent")
    async with httpx.AsyncClient(
        base_url=bridge.http.base_url, verify=trusting(renewed.ca_file, own), trust_env=False
    ) as client:
        assert (await client.get("/version")).status_code == 200
    files.key.write_text("nonsense")
    async with httpx.AsyncClient(
        base_url=bridge.http.base_url, verify=trusting(renewed.ca_file, own), trust_env=False
    ) as client:
        assert (await client.get("/version")).status_code == 200
    assert "the certificate stays as it is: --tls-certificate" in bridge.process.log
    # A connection that was there all the time.
    assert (await bridge.http.get("/version")).status_code == 200


async def test_what_is_too_large_for_the_sidecar_is_413_and_the_next_request_is_served_D01(
    tmp_path: Path, model_directory: Path
) -> None:
    """Not 5xx, which clients would send again."""
    limits = Limits(max_message_bytes=64 * 1024)
    async with (
        guarded_sidecar(answering_engine(model_directory), limits=limits) as sidecar,
        bridge_process(tmp_path, sidecar=sidecar.address) as bridge,
    ):
        refused = await bridge.http.post("/v1/completions", json={"prompt": [40_000] * 30_000})
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        assert "65536" in refused.json()["error"]["message"]
        assert (await bridge.chat()).status_code == 200


async def test_a_sidecar_that_is_full_is_503(tmp_path: Path, model_directory: Path) -> None:
    """Which clients do send again, and wait."""
    engine = answering_engine(
        model_directory, {"token_ids": [34]}, {"token_ids": [35, 2], "delay_ms": 2000, "finish_reason": "stop"}
    )
    async with (
        guarded_sidecar(engine, limits=Limits(max_running_calls=1)) as sidecar,
        bridge_process(tmp_path, sidecar=sidecar.address) as bridge,
    ):
        running = asyncio.create_task(bridge.chat())
        await eventually(lambda: sidecar.running_call_count == 1)
        refused = await bridge.chat()
        assert refused.status_code == 503
        assert "runs as many calls as it may (1)" in refused.json()["error"]["message"]
        assert (await running).status_code == 200


LARGE_METADATA: list[tuple[dict[str, str], str, str]] = [
    ({f"k{i}": "" for i in range(17)}, "metadata", "must have at most 16 pairs, has 17"),
    ({"k" * 65: ""}, "metadata", "a key must have at most 64 characters, has 65"),
    ({"note": "x" * 513}, "metadata.note", "must have at most 512 characters, has 513"),
]


async def test_metadata_has_openais_limits(tmp_path: Path, model_directory: Path) -> None:
    async with (
        guarded_sidecar(answering_engine(model_directory)) as sidecar,
        bridge_process(tmp_path, sidecar=sidecar.address) as bridge,
    ):
        for metadata, field, problem in LARGE_METADATA:
            refused = await bridge.chat(metadata=metadata)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
            assert refused.json()["error"]["message"] == f"{field}: {problem}"
        # NeMo Gym leaves there what it has read from it.
        long = {"extra_body": json.dumps({"x": "y" * 2000}), "note": "x" * 512}
        assert (await bridge.chat(metadata=long)).status_code == 200


# What a process does not begin with.

SCRIPTED = ["--engine", "scripted", "--script", "missing.json", "--tokenizer", "missing"]
PROGRAMS = {
    "tokentape-sidecar": SCRIPTED,
    "tokentape-bridge": ["--sidecar", "main=127.0.0.1:1"],
}


async def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name(program)), *PROGRAMS[program], *options]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30, check=False)


FILES: list[tuple[str, str, list[str]]] = [
    ("tokentape-sidecar", "--token-file", []),
    ("tokentape-sidecar", "--control-token-file", ["--control", "127.0.0.1:0"]),
    ("tokentape-bridge", "--api-key-file", []),
    ("tokentape-bridge", "--sidecar-token-file", []),
    ("tokentape-bridge", "--sidecar-ca", []),
]


@pytest.mark.parametrize(
    ("program", "option", "more"), FILES, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_a_file_that_cannot_be_used_is_one_line_and_status_1(
    program: str, option: str, more: list[str], tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    ended = await run(program, *more, option, str(missing))
    assert (ended.returncode, ended.stderr) == (
        1,
        f"{program}: {option} {missing} cannot be used: No such file or directory\n",
    )
    if "ca" not in option:
        empty = secret_file(tmp_path / "empty")
        ended = await run(program, *more, option, str(empty))
        assert (ended.returncode, ended.stderr) == (
            1,
            f"{program}: {option} {empty} cannot be used: it holds no secret\n",
        )


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_certificate_that_cannot_be_used_is_one_line_and_status_1(
    program: str, authority: Authority, tmp_path: Path
) -> None:
    files = authority.sign()
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    for key, reason in ((tmp_path / "missing", "No such file or directory"), (nonsense, "PEM lib|NO_START_LINE")):
        ended = await run(program, "--tls-certificate", str(files.certificate), "--tls-key", str(key))
        assert ended.returncode == 1
        (line,) = ended.stderr.splitlines()
        assert line.startswith(
            f"{program}: --tls-certificate {files.certificate} with --tls-key {key} cannot be used: "
        )
        assert any(part in line for part in reason.split("|")), line
