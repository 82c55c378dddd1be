"""ZAPHandler: tells libzmq which clients' keys are on the list (ZeroMQ RFC 27).

    async with open_zap_handler(router, keys) as handler:
        nursery.start_soon(handler.run)

libzmq asks over a socket inside the process, at each handshake, before it lets one frame of the client in. The key that
was shown comes with every message afterwards, as its User-Id.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
from zmq.utils import z85

from genbatch.actors.gateways.curve_keys import ServerKeys
from genbatch.actors.runtime.zeromq_socket import Parts, ZeroMQSocket, pumped

logger = logging.getLogger(__name__)

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"genbatch"
VERSION = b"1.0"


class ZAPHandler:
    """Answers the questions of one context; made by `open_zap_handler`.

    Args:
        socket: bound to the address where libzmq asks.
        keys: the list.
    """

    def __init__(self, socket: ZeroMQSocket, keys: ServerKeys) -> None:
        self._socket = socket
        self._keys = keys

    async def run(self) -> None:
        """Answers until cancelled."""
        while True:
            question = await self._socket.recv()
            await self._socket.send(self._answer(question))

    def _answer(self, question: Parts) -> Parts:
        """[version, request id, status, text, user id, metadata], each of which libzmq checks."""
        match question:
            case [version, request_id, domain, address, _identity, mechanism, *credentials]:
                pass
            case _:
                return [VERSION, b"", b"500", b"not a question", b"", b""]
        if (version, domain, mechanism, len(credentials)) != (VERSION, DOMAIN, b"CURVE", 1):
            return [VERSION, request_id, b"500", b"not a question of this service's", b"", b""]
        key = z85.encode(credentials[0])
        name = self._keys.client_name(key.decode())
        if name is None:
            logger.info("refused a ZeroMQ client at %s: its key %s is not on the list", address.decode(), key.decode())
            return [VERSION, request_id, b"400", b"the key is not on the list", b"", b""]
        return [VERSION, request_id, b"200", b"OK", key, b""]


@asynccontextmanager
async def open_zap_handler(socket: ZeroMQSocket, keys: ServerKeys) -> AsyncIterator[ZAPHandler]:
    """Makes a socket, before it is bound, let in only clients whose keys are on the list.

    Args:
        socket: the service's.
        keys: the service's own, and the list.
    """
    async with pumped(socket.context.socket(zmq.REP)) as answers:
        answers.bind(ADDRESS)
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.pair.secret)
        socket.set(zmq.ZAP_DOMAIN, DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer nobody gets in, rather than everybody
        yield ZAPHandler(answers, keys)
