"""D09: what `[::]` means where a machine has no IPv6."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from tokentape.listen import ListenAddress


class _NoIpv6(socket.socket):
    """A kernel's socket, where the kernel was built or booted without IPv6."""

    def __init__(self, family: int = socket.AF_INET, *arguments: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, *arguments)


@pytest.fixture
def _no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", _NoIpv6)


@pytest.mark.usefixtures("_no_ipv6")
@pytest.mark.parametrize(
    ("text", "meant"),
    [("[::]:50051", "0.0.0.0:50051"), ("[::1]:50051", "[::1]:50051"), ("localhost:0", "localhost:0")],
)
def test_without_ipv6_all_interfaces_are_those_of_ipv4_D09(text: str, meant: str) -> None:
    assert str(ListenAddress.parse(text)) == meant
