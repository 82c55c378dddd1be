"""The gateway's benchmark compares like with like."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq

from tests.benchmarks import gateway_process

COUNT = 300  # tokens: two lengths of their indices


@contextmanager
def asked(peer: str, address: str) -> Iterator["zmq.Socket[bytes]"]:
    """A client of the running peer."""
    command = [sys.executable, gateway_process.__file__, peer, "even", address, "1"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            socket.linger = 0
            socket.rcvtimeo = 60_000
            socket.connect(address)
            socket.send(msgpack.packb([0, 1, "stream", [{"token_ids": [5]}]]))
            yield socket
        finally:
            process.kill()


def without_time(message: bytes) -> tuple[Any, bytes]:
    """A token's fields, and its bytes, both without the text that says when it was made."""
    fields = msgpack.unpackb(message)
    text = fields[2].pop()
    return fields, message.replace(msgpack.packb(text), b"")  # with its length, which differs now and then


def test_the_bare_router_sends_the_bytes_that_the_gateway_sends(tmp_path: Path) -> None:
    sent = {}
    for peer in gateway_process.PEERS:
        with asked(peer, f"ipc://{tmp_path / peer}") as socket:
            sent[peer] = [without_time(socket.recv()) for _ in range(COUNT)]
    assert sent["bare"] == sent["gateway"]
