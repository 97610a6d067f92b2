"""The bridge's certificate, which may be replaced while it serves."""

from __future__ import annotations

import logging
import ssl

from tokentape.tls import ServerTls, UnusableCertificate

_logger = logging.getLogger(__name__)


def renewing_context(tls: ServerTls) -> ssl.SSLContext:
    """Return a context that serves each new connection with the files of `tls` as they are then.

    A change that cannot be used changes nothing, and the log says so. Raises `UnusableCertificate` where the files of
    now cannot be used.
    """
    context = tls.context()
    # OpenSSL calls this at each handshake, whether or not the client names a server.
    context.sni_callback = _Renewal(tls, context)
    return context


class _Renewal:
    def __init__(self, tls: ServerTls, context: ssl.SSLContext) -> None:
        self._tls = tls
        self._seen = tls.signatures()
        self._newest = context

    def __call__(self, connection: ssl.SSLObject, _server_name: str | None, _context: ssl.SSLContext) -> None:
        found = self._tls.signatures()
        if found != self._seen:
            self._seen = found
            self._renew()
        connection.context = self._newest

    def _renew(self) -> None:
        try:
            self._newest = self._tls.context()
        except UnusableCertificate as error:
            _logger.error("the certificate stays as it is: %s", error)
        else:
            _logger.info("--tls-certificate %s is served as it is now", self._tls.certificate_file)
