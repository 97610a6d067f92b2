"""Sidecars that show a certificate, and ask for one: who believes whom, and certificates that are replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from support.asking import model_name
from support.certificates import Authority, secret_file
from support.engines import ManualEngine
from support.guarded import guarded_sidecar
from support.refusals import refused
from support.sidecar_client import SidecarClient
from support.waiting import eventually
from tokentape.access import Access, UnusableAccess
from tokentape.channel import dial
from tokentape.tls import ServerTls, UnusableCertificate

Status = grpc.StatusCode

DATA, CONTROL = "the-data-token", "the-control-token"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


async def test_tls_and_a_token(authority: Authority, tmp_path: Path) -> None:
    file = secret_file(tmp_path / "token", DATA)
    async with guarded_sidecar(ManualEngine(), token_file=file, tls=authority.serve()) as sidecar:
        assert await model_name(sidecar.address, authority.trusted(token_file=file))
        with refused(Status.UNAUTHENTICATED, "no token"):
            await model_name(sidecar.address, authority.trusted())


async def test_a_server_of_another_authority_is_not_believed(authority: Authority, tmp_path: Path) -> None:
    """Nor is the token shown to it."""
    file = secret_file(tmp_path / "token", DATA)
    async with guarded_sidecar(ManualEngine(), token_file=file, tls=Authority(tmp_path / "b").serve()) as sidecar:
        with refused(Status.UNAVAILABLE, "CERTIFICATE_VERIFY_FAILED"):
            await model_name(sidecar.address, authority.trusted(token_file=file))


async def test_an_expired_certificate_is_not_believed(authority: Authority) -> None:
    async with guarded_sidecar(ManualEngine(), tls=authority.serve(expired=True)) as sidecar:
        with refused(Status.UNAVAILABLE, "certificate has expired"):
            await model_name(sidecar.address, authority.trusted())


async def test_a_certificate_of_another_host_is_not_believed(authority: Authority) -> None:
    files = authority.sign("elsewhere.example")
    async with guarded_sidecar(ManualEngine(), tls=ServerTls(files.certificate, files.key)) as sidecar:
        with refused(Status.UNAVAILABLE, "127.0.0.1"):
            await model_name(sidecar.address, authority.trusted())


async def test_mutual_tls_lets_in_who_has_a_certificate(authority: Authority, tmp_path: Path) -> None:
    clients, others = Authority(tmp_path / "clients"), Authority(tmp_path / "others")
    async with guarded_sidecar(ManualEngine(), tls=authority.serve(clients=clients)) as sidecar:
        assert await model_name(sidecar.address, authority.trusted(own=clients.sign("trainer")))
        strangers = {"none": None, "of others": others.sign("trainer"), "expired": clients.sign("it", expired=True)}
        for own in strangers.values():
            with refused(Status.UNAVAILABLE, ""):
                await model_name(sidecar.address, authority.trusted(own=own))
        # Others are served as before.
        assert await model_name(sidecar.address, authority.trusted(own=clients.sign("trainer")))


async def test_a_renewed_certificate_is_served_and_streams_run_on(authority: Authority, tmp_path: Path) -> None:
    renewed, engine = Authority(tmp_path / "renewed"), ManualEngine()
    files = authority.sign()
    async with (
        guarded_sidecar(engine, tls=ServerTls(files.certificate, files.key)) as sidecar,
        SidecarClient(sidecar.address, access=authority.trusted()) as client,
    ):
        running = asyncio.create_task(client.generate([1]))
        await eventually(lambda: bool(engine.submitted))
        files.become(renewed.sign())
        assert await model_name(sidecar.address, renewed.trusted())
        with refused(Status.UNAVAILABLE, "CERTIFICATE_VERIFY_FAILED"):
            await model_name(sidecar.address, authority.trusted())
        engine.finish(engine.submitted[0].call_id, 5)
        assert (await running).token_ids() == [5]


@pytest.mark.parametrize("change", ["deleted", "other key", "no certificate"])
async def test_a_certificate_that_cannot_be_used_changes_nothing(
    authority: Authority, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.sign()
    async with guarded_sidecar(ManualEngine(), tls=ServerTls(files.certificate, files.key)) as sidecar:
        if change == "deleted":
            files.certificate.unlink()
        elif change == "other key":
            files.key.write_bytes(authority.sign().key.read_bytes())
        else:
            files.certificate.write_text("nonsense")
        assert await model_name(sidecar.address, authority.trusted())
    assert any("the certificate stays as it is" in record.getMessage() for record in caplog.records)


async def test_tls_to_a_plain_port_says_what_is_wrong(authority: Authority) -> None:
    async with guarded_sidecar(ManualEngine()) as sidecar:
        with refused(Status.UNAVAILABLE, "WRONG_VERSION_NUMBER"):
            await model_name(sidecar.address, authority.trusted())
        assert await model_name(sidecar.address)


async def test_what_is_no_tls_to_a_tls_port_gets_nothing(authority: Authority) -> None:
    async with guarded_sidecar(ManualEngine(), tls=authority.serve()) as sidecar:
        with refused(Status.UNAVAILABLE, "Socket closed|Connection reset|failed to connect"):
            await model_name(sidecar.address)
        assert await model_name(sidecar.address, authority.trusted())


async def test_files_that_are_not_there_are_named(authority: Authority, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for access, option in (
        (Access(missing), "--sidecar-token-file"),
        (Access(ca_file=missing), "--sidecar-ca"),
        (Access(None, authority.ca_file, missing, missing), "--sidecar-key"),
    ):
        with pytest.raises(UnusableAccess, match=f"^{option} {missing} cannot be used: No such file or directory$"):
            dial("127.0.0.1:1", access)
    files = authority.sign()
    for tls, option in (
        (ServerTls(missing, files.key), f"--tls-certificate {missing}"),
        (ServerTls(files.certificate, authority.sign().key), "KEY_VALUES_MISMATCH"),
        (ServerTls(files.certificate, files.key, missing), f"--tls-client-ca {missing}"),
    ):
        with pytest.raises(UnusableCertificate, match=option):
            async with guarded_sidecar(ManualEngine(), tls=tls):
                pass
