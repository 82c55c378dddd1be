"""GatewayClients: plain DEALER sockets that read tokens and tell how late each is.

They speak the wire by hand, so that what is measured is the service's side.
"""

import time

import msgpack
import zmq

TOKEN = 0x93  # the first byte of an array of three: a notification


class GatewayClients:
    """Each socket has one stream open at a time.

    Args:
        address: where the service listens.
        count: of the sockets.
    """

    def __init__(self, address: str, count: int) -> None:
        self._sockets = []
        self._poller = zmq.Poller()
        self._msgids = [0] * count
        for _ in range(count):
            socket = zmq.Context.instance().socket(zmq.DEALER)
            socket.rcvhwm = 0
            socket.linger = 0
            socket.connect(address)
            self._poller.register(socket, zmq.POLLIN)
            self._sockets.append(socket)
        self._index = {socket: index for index, socket in enumerate(self._sockets)}
        for index in range(count):
            self._ask(index)

    def read(self, seconds: float, *, timed: bool) -> tuple[int, list[float]]:
        """Token messages that come within so many seconds, and if `timed` each one's age in seconds."""
        tokens, ages = 0, []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for socket, _ in self._poller.poll(100):
                try:
                    while True:
                        data = socket.recv(zmq.NOBLOCK)
                        if data[0] != TOKEN:
                            self._ended(self._index[socket], data)
                            continue
                        if timed:
                            now = time.perf_counter_ns()
                            message = msgpack.unpackb(data)
                            if message[1] != "token":
                                continue
                            ages.append((now - int(message[2][3])) * 1e-9)
                        tokens += 1
                except zmq.Again:
                    pass
        return tokens, ages

    def close(self) -> None:
        """Leaves."""
        for socket in self._sockets:
            socket.close()

    def _ended(self, index: int, data: bytes) -> None:
        message = msgpack.unpackb(data)
        if message[2] is not None:
            raise RuntimeError(f"a stream failed: {message[2]}")
        self._ask(index)

    def _ask(self, index: int) -> None:
        self._msgids[index] += 1
        self._sockets[index].send(msgpack.packb([0, self._msgids[index], "stream", [{"token_ids": [5]}]]))
