"""A watcher that can be killed: `python watch_process.py ADDRESS TAPE_ID READER_TOKEN FROM_SEQUENCE`.

It writes each response as it comes to standard output: its length in 4 bytes, then the message.
"""

from __future__ import annotations

import sys

import grpc

from tokentape.v1 import tape_pb2, tape_pb2_grpc


def main(address: str, tape_id: str, reader_token: str, from_sequence: str) -> None:
    """Watch to the tape's end."""
    request = tape_pb2.WatchTapeRequest(tape_id=tape_id, reader_token=reader_token, from_sequence=int(from_sequence))
    with grpc.insecure_channel(address) as channel:
        for response in tape_pb2_grpc.TapeServiceStub(channel).WatchTape(request):
            content = response.SerializeToString()
            sys.stdout.buffer.write(len(content).to_bytes(4, "big") + content)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
