"""Clients that mean harm, each in one way, over plain sockets: nothing of ours holds them back.

python -m tests.hostile.clients KIND SOCKET TOKEN ZEROMQ HTTP

All but those that have no token say hello with one first. What each was answered is counted; what it is not answered
within a minute is a fault of the service.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import trio
import trio.lowlevel
import zmq

from genbatch.actors.runtime.zeromq_socket import open_socket

Answers = Counter[str]  # by the answer's kind: "result", or an error's code

ANSWER_S = 60.0
HELLO_BYTES = 4000  # of the 4,096 that are read before a hello is complete
BIG_PROMPT = "word " * 200_000  # a megabyte
TEXT = "word " * 20_000  # a tenth of one
TOKEN_IDS = [5, 6, 7, 8] * 20_000
FLOOD = 64  # calls that are sent before the first answer is read
CONNECTIONS = 100
SLOW = 6
STREAMS, LONG_TOKENS = 8, 100


@dataclass(frozen=True, slots=True)
class Place:
    """Where the service is.

    Args:
        path: of its socket.
        token: with which it lets one in.
        zeromq: its address there.
        http: its port of this machine there.
    """

    path: str
    token: str
    zeromq: str = ""
    http: str = ""


class Line:
    """A connection, without manners."""

    def __init__(self, stream: trio.SocketStream, answers: Answers) -> None:
        self._stream = stream
        self._answers = answers
        self._unpacker = msgpack.Unpacker(strict_map_key=False)

    @classmethod
    async def open(cls, place: Place, answers: Answers) -> "Line":
        """One that nobody knows yet."""
        stream = await trio.open_unix_socket(place.path)
        line = cls(stream, answers)
        try:
            stream.socket.getpeername()  # where the service's queue is full it has none, whatever trio says
        except OSError:
            await line.hang_up()
            raise
        return line

    @classmethod
    async def enter(cls, place: Place, answers: Answers) -> "Line":
        """One that has shown its token."""
        line = await cls.open(place, Counter())
        await line.tell(("hello", {"token": place.token}))
        await line.hear()
        line._answers = answers
        return line

    async def tell(self, *calls: tuple[str, dict[str, Any]]) -> None:
        """Sends calls without waiting for anything."""
        data = b"".join(msgpack.packb([0, number, method, [params]]) for number, (method, params) in enumerate(calls))
        await self._stream.send_all(data)

    async def flood(self, count: int, *calls: tuple[str, dict[str, Any]]) -> None:
        """Sends calls without waiting for anything, and counts so many answers meanwhile."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.tell, *calls)
            await self.hear(count)
            nursery.cancel_scope.cancel()

    async def drip(self, data: bytes) -> None:
        """Sends a byte at a time."""
        for place in range(len(data)):
            await self._stream.send_all(data[place : place + 1])
            await trio.lowlevel.checkpoint()

    async def hear(self, count: int = 1) -> None:
        """Counts so many answers; a stream's tokens are none."""
        with trio.fail_after(ANSWER_S):
            while count > 0:
                data = await self._stream.receive_some()
                if not data:
                    self._answers["closed"] += 1
                    return
                self._unpacker.feed(data)
                for message in self._unpacker:
                    if message[0] == 1:
                        self._answers[message[2]["code"] if message[2] else "result"] += 1
                        count -= 1

    async def hang_up(self) -> None:
        await self._stream.aclose()


async def slow_hellos(place: Place, answers: Answers) -> None:
    """Some connections say hello, a byte at a time, with as long a token as may be."""
    hello = msgpack.packb([0, 1, "hello", [{"token": "x" * (HELLO_BYTES - 20)}]])

    async def say() -> None:
        line = await Line.open(place, answers)
        await line.drip(hello)
        await line.hear()
        await line.hang_up()

    async with trio.open_nursery() as nursery:
        for _ in range(SLOW):
            nursery.start_soon(say)


async def big_prompts(place: Place, answers: Answers) -> None:
    """A prompt of a megabyte that can never fit, again as soon as it is refused."""
    line = await Line.enter(place, answers)
    for _ in range(3):
        await line.tell(("generate", {"prompt": BIG_PROMPT, "max_tokens": 1}))
        await line.hear()
    await line.hang_up()


async def tokenize_flood(place: Place, answers: Answers) -> None:
    """Long texts to be tokenized, all at once, twice as many of them as are heard of."""
    line = await Line.enter(place, answers)
    await line.flood(FLOOD // 2, *[("tokenize", {"prompt": TEXT})] * FLOOD)
    await line.hang_up()


async def detokenize_flood(place: Place, answers: Answers) -> None:
    """Token ids to be made text, likewise."""
    line = await Line.enter(place, answers)
    await line.flood(FLOOD // 2, *[("detokenize", {"token_ids": TOKEN_IDS})] * FLOOD)
    await line.hang_up()


async def grammar_flood(place: Place, answers: Answers) -> None:
    """Expressions that take long to compile, no two alike, some of them too large."""
    line = await Line.enter(place, answers)
    sizes = [random.randrange(100, 60_000) for _ in range(FLOOD)]
    regexes = [f"([a-z]{{1,{size}}}[0-9]){{2}}" for size in sizes]
    await line.flood(FLOOD, *[("generate", {"prompt": "a", "max_tokens": 1, "regex": one}) for one in regexes])
    await line.hang_up()


async def connection_flood(place: Place, answers: Answers) -> None:
    """Connections that say nothing, or half a word, and end."""
    lines = []
    for number in range(CONNECTIONS):
        with suppress(OSError, trio.BrokenResourceError):
            line = await Line.open(place, answers)
            lines.append(line)
            if number % 2:
                await line.drip(b"\x94\x00")
    for line in lines:
        await line.hang_up()
    answers["closed"] += len(lines)


async def sessions(place: Place, answers: Answers) -> None:
    """Streams with credit for one token, of which the caller hangs up without a word while they run."""
    for _ in range(16):
        line = await Line.enter(place, answers)
        params = {"prompt": "I shall not read", "max_tokens": 64, "ignore_eos": True}
        await line._stream.send_all(msgpack.packb([0, 1, "stream", [params, {"credit": 1}]]))
        with trio.move_on_after(0.05):
            await line._stream.receive_some()
        await line.hang_up()
        answers["closed"] += 1


async def greedy_client(place: Place, answers: Answers) -> None:
    """As many ordinary requests as are taken, all at once."""
    line = await Line.enter(place, answers)
    params = {"prompt": "I want it all", "max_tokens": 16, "ignore_eos": True}
    await line.flood(FLOOD, *[("generate", params)] * FLOOD)
    await line.hang_up()


async def long_streams(place: Place, answers: Answers) -> None:
    """Long streams in every slot."""
    line = await Line.enter(place, answers)
    params = {"prompt": "It was a long and winding road", "max_tokens": LONG_TOKENS, "ignore_eos": True}
    await line.flood(STREAMS, *[("stream", params)] * STREAMS)
    await line.hang_up()


HALF_MESSAGES, HALF_BYTES = 24, 3 * 2**20  # more than all clients' unfinished messages may have
UNREAD_CLIENTS, UNREAD_CALLS = 16, 200


async def posts_to_rpc(place: Place, answers: Answers) -> None:
    """Web pages' requests at the msgpack-RPC door, with calls in their bodies."""
    drain = msgpack.packb([0, 1, "drain", [{"timeout_s": 0.0}]])
    post = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n\r\n" + drain * 100
    for _ in range(CONNECTIONS):
        line = await Line.open(place, Counter())
        with suppress(trio.BrokenResourceError):
            await line._stream.send_all(post)
            await line.hear(2)  # its refusal, and the end
        answers["closed"] += 1
        await line.hang_up()


async def unfinished_strings(place: Place, answers: Answers) -> None:
    """Long strings that never end, on many connections at once."""
    head = b"\x94\x00\x01\xa8generate\x91\x81\xa6prompt\xdb\x00\x3f\xf0\x00"
    async with AsyncExitStack() as stack:
        for _ in range(HALF_MESSAGES):
            line = await Line.enter(place, answers)
            stack.push_async_callback(line.hang_up)
            with suppress(trio.BrokenResourceError):
                await line._stream.send_all(head + bytes(HALF_BYTES))
    answers["closed"] += HALF_MESSAGES


async def unread_stats(place: Place, answers: Answers) -> None:
    """Many clients that ask for the counters again and again and read nothing."""
    async with AsyncExitStack() as stack:
        for _ in range(UNREAD_CLIENTS):
            line = await Line.enter(place, answers)
            stack.push_async_callback(line.hang_up)
            with trio.move_on_after(1.0), suppress(trio.BrokenResourceError):
                await line.tell(*[("stats", {})] * UNREAD_CALLS)
    answers["closed"] += UNREAD_CLIENTS


# Over ZeroMQ

# A client's part of ZMTP 3.0 without keys: its greeting, and the command READY.
ZMTP_HANDSHAKE = (
    b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
)
RECONNECTS, FLOODS = 5, 8


async def old_greetings(place: Place, answers: Answers) -> None:
    """Peers of ZMTP 1.0 and 2.0, and web pages' requests, at the ZeroMQ door."""
    body = msgpack.packb([0, 1, "drain", [{"timeout_s": 0.0}]])
    frame = bytes([len(body) + 1, 0]) + body
    new_signature = b"\xff" + bytes(7) + b"\x01\x7f"
    said = (
        b"\x01\x00" + frame,
        new_signature + b"\x01\x05\x00\x00" + bytes([0, len(body)]) + body,
        b"POST / HTTP/1.1\r\n\r\n" + body,
    )
    for number in range(CONNECTIONS):
        stream = await connect_to_zeromq(place)
        with suppress(trio.BrokenResourceError), trio.fail_after(ANSWER_S):
            await stream.send_all(said[number % len(said)])
            while await stream.receive_some(4096):
                pass
        answers["closed"] += 1
        await stream.aclose()


async def connect_to_zeromq(place: Place) -> trio.SocketStream:
    """Connect to the ZeroMQ door without a handshake."""
    return await trio.open_tcp_stream("127.0.0.1", int(place.zeromq.rpartition(":")[2]))


async def zeromq_reconnects(place: Place, answers: Answers) -> None:
    """Whole messages of one byte as fast as a connection takes them, and another connection after each."""
    flood = b"\x00\x01x" * 2**16

    async def flood_again() -> None:
        for _ in range(RECONNECTS):
            with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                async with await connect_to_zeromq(place) as stream:
                    await stream.send_all(ZMTP_HANDSHAKE)
                    for _ in range(FLOODS):
                        await stream.send_all(flood)

    async with trio.open_nursery() as nursery:
        for _ in range(SLOW):
            nursery.start_soon(flood_again)
    answers["closed"] += SLOW * RECONNECTS


async def zeromq_messages(place: Place, answers: Answers) -> None:
    """Megabytes that can never fit and messages that are none, as fast as they are taken."""
    params = {"prompt": BIG_PROMPT, "max_tokens": 1}
    async with open_socket(zmq.DEALER) as dealer:
        dealer.connect(place.zeromq)
        with trio.fail_after(ANSWER_S):
            for number in range(FLOOD):
                await dealer.send([msgpack.packb([0, number, "generate", [params]]) if number % 2 else b"\xc1"])
            for _ in range(FLOOD):
                [message] = await dealer.recv()
                answers[msgpack.unpackb(message)[2]["code"]] += 1


async def zeromq_tokenize_flood(place: Place, answers: Answers) -> None:
    """Long texts to be tokenized, all at once."""
    async with open_socket(zmq.DEALER) as dealer:
        dealer.connect(place.zeromq)
        with trio.fail_after(ANSWER_S):
            for number in range(FLOOD):
                await dealer.send([msgpack.packb([0, number, "tokenize", [{"prompt": TEXT}]])])
            for _ in range(FLOOD):
                error = msgpack.unpackb((await dealer.recv())[0])[2]
                answers[error["code"] if error else "result"] += 1


async def zeromq_connections(place: Place, answers: Answers) -> None:
    """Connections that say nothing, or what is no message, and end."""
    async with AsyncExitStack() as stack:
        for number in range(CONNECTIONS):
            dealer = await stack.enter_async_context(open_socket(zmq.DEALER))
            dealer.connect(place.zeromq)
            if number % 2:
                await dealer.send([b"\x94\x00"])
    answers["closed"] += CONNECTIONS


# Over HTTP

HALF_BODIES = 40  # more than all unfinished bodies may have


async def ask(place: Place, answers: Answers, request: bytes, *, drips: bool = False) -> None:
    """Sends a request, a byte at a time if it drips, and counts the answer by its status."""
    stream = await trio.open_tcp_stream("127.0.0.1", int(place.http))
    async with stream:
        with trio.fail_after(ANSWER_S), suppress(trio.BrokenResourceError):
            for start in range(0, len(request), 1 if drips else len(request)):
                await stream.send_all(request[start : start + (1 if drips else len(request))])
                await trio.lowlevel.checkpoint()
        head = await stream.receive_some(2**16)
        answers[f"http {head[9:12].decode()}" if head else "closed"] += 1


async def slow_headers(place: Place, answers: Answers) -> None:
    """Some connections send a long header, a byte at a time, and have no token."""
    request = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"x" * HELLO_BYTES + b"\r\n\r\n"
    async with trio.open_nursery() as nursery:
        for _ in range(SLOW):
            nursery.start_soon(partial(ask, place, answers, request, drips=True))


async def big_bodies(place: Place, answers: Answers) -> None:
    """Prompts that can never fit, in bodies of a megabyte and less than that; each on a connection of its own."""
    for size in (900_000, 1_200_000) * 2:
        body = json.dumps({"prompt": ("word " * 240_000)[:size], "max_tokens": 1}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {place.token}\r\n"
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        await ask(place, answers, (head + length).encode() + body)


async def tiny_chunks(place: Place, answers: Answers) -> None:
    """Prompts that can never fit, in chunks of a byte."""
    body = json.dumps({"prompt": "word " * 4000, "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {place.token}\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    async with trio.open_nursery() as nursery:
        for _ in range(SLOW):
            nursery.start_soon(ask, place, answers, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks)


async def half_bodies(place: Place, answers: Answers) -> None:
    """Bodies of a megabyte that lack their end, on many connections at once."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {place.token}\r\n"
    async with AsyncExitStack() as stack:
        for _ in range(HALF_BODIES):
            with suppress(OSError):
                stream = await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", int(place.http)))
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(f"{head}Content-Length: 1000000\r\n\r\n".encode() + bytes(999_999))
    answers["closed"] += HALF_BODIES


async def http_connections(place: Place, answers: Answers) -> None:
    """Connections that say nothing, or half a line, and end."""
    async with AsyncExitStack() as stack:
        for number in range(CONNECTIONS):
            with suppress(OSError):
                stream = await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", int(place.http)))
                if number % 2:
                    with suppress(trio.BrokenResourceError):
                        await stream.send_all(b"GET /v1")
    answers["closed"] += CONNECTIONS


async def http_gets(place: Place, answers: Answers) -> None:
    """Connect, GET and close, without a look at the answer."""
    request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    for _ in range(CONNECTIONS):
        with suppress(OSError, trio.BrokenResourceError):
            async with await trio.open_tcp_stream("127.0.0.1", int(place.http)) as stream:
                await stream.send_all(request)
    answers["closed"] += CONNECTIONS


async def http_2_resets(place: Place, answers: Answers) -> None:
    """HTTP/2 at once: the preface, settings, and streams that are begun and reset."""
    preface, settings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0\0\0\4\0\0\0\0\0"
    begun = [b"\0\0\1\1\5" + number.to_bytes(4) + b"\x82" for number in range(1, 400, 2)]
    resets = [b"\0\0\4\3\0" + number.to_bytes(4) + b"\0\0\0\x08" for number in range(1, 400, 2)]
    frames = b"".join(frame for pair in zip(begun, resets, strict=True) for frame in pair)
    async with trio.open_nursery() as nursery:
        for _ in range(SLOW):
            nursery.start_soon(ask, place, answers, preface + settings + frames)


async def slow_streams(place: Place, answers: Answers) -> None:
    """Streams over HTTP/1.0 whose readers take a byte now and then, and leave in the middle."""
    params = {"prompt": "I shall hardly read", "max_tokens": 64, "ignore_eos": True, "stream": True}
    body = json.dumps(params).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {place.token}\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def read() -> None:
        async with await trio.open_tcp_stream("127.0.0.1", int(place.http)) as stream:
            await stream.send_all(request)
            status = b""
            with trio.fail_after(ANSWER_S):
                while len(status) < 12 and (part := await stream.receive_some(1)):
                    status += part
        answers[f"http {status[9:12].decode()}" if status else "closed"] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(SLOW):
            nursery.start_soon(read)


Kind = Callable[[Place, Answers], Awaitable[None]]
KINDS: dict[str, Kind] = {
    one.__name__: one
    for one in (
        slow_hellos,
        big_prompts,
        tokenize_flood,
        detokenize_flood,
        grammar_flood,
        connection_flood,
        sessions,
        greedy_client,
        long_streams,
        posts_to_rpc,
        unfinished_strings,
        unread_stats,
        old_greetings,
        zeromq_reconnects,
        zeromq_messages,
        zeromq_tokenize_flood,
        zeromq_connections,
        slow_headers,
        big_bodies,
        tiny_chunks,
        half_bodies,
        http_connections,
        http_gets,
        http_2_resets,
        slow_streams,
    )
}


async def again_and_again(kind: Kind, place: Place) -> None:
    """Until it is killed; what was answered so far goes to standard output."""
    answers: Answers = Counter()
    while True:
        try:
            await kind(place, answers)
        except (OSError, trio.BrokenResourceError) as error:
            answers[type(error).__name__] += 1
        print(dict(answers), flush=True)
        await trio.lowlevel.checkpoint()


if __name__ == "__main__":
    trio.run(again_and_again, KINDS[sys.argv[1]], Place(*sys.argv[2:]))
