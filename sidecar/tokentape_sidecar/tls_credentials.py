"""A gRPC server's certificate, which may be replaced while it serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import cast

import grpc

from tokentape.tls import ServerTls, UnusableCertificate

_logger = logging.getLogger(__name__)


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Return the credentials of a server whose files are those of `tls`, whenever they change.

    A change that cannot be used changes nothing, and the log says so. Connections that are there stay. Raises
    `UnusableCertificate` where the files of now cannot be used.
    """
    certificates = _Certificates(tls)
    make = cast("Callable[..., grpc.ServerCredentials]", grpc.dynamic_ssl_server_credentials)
    return make(_read(tls), certificates.if_changed, tls.client_ca_file is not None)


class _Certificates:
    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._seen = tls.signatures()
        # gRPC asks from threads of its own.
        self._lock = threading.Lock()

    def if_changed(self) -> object | None:
        """Return the files' new content, or `None` where they are as they were; gRPC asks at each handshake."""
        with self._lock:
            found = self._tls.signatures()
            if found == self._seen:
                return None
            self._seen = found
            try:
                configuration = _read(self._tls)
            except UnusableCertificate as error:
                _logger.error("the certificate stays as it is: %s", error)
                return None
        _logger.info("--tls-certificate %s is served as it is now", self._tls.certificate_file)
        return configuration


def _read(tls: ServerTls) -> object:
    """Return the files' content as gRPC takes it. Raises `UnusableCertificate`."""
    # gRPC would fail at each handshake where the files do not go together, and not say so.
    tls.context()
    try:
        pair = tls.key_file.read_bytes(), tls.certificate_file.read_bytes()
        client_ca = None if tls.client_ca_file is None else tls.client_ca_file.read_bytes()
    except OSError as error:
        raise UnusableCertificate(f"--tls-certificate: its files cannot be read: {error}") from error
    make = cast("Callable[..., object]", grpc.ssl_server_certificate_configuration)
    return make([pair], client_ca)
