"""The socket that the bridge listens at."""

from __future__ import annotations

import socket

from tokentape.listen import ListenAddress
from tokentape_bridge.process import bind


def test_a_frame_does_not_wait_for_the_one_before_to_be_acknowledged() -> None:
    with bind(ListenAddress("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert client.getpeername() == accepted.getsockname()
