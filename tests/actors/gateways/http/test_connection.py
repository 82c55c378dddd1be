"""Connections as others speak HTTP/1.x over them: requests by hand, and how each connection ends."""

import json
import socket
import struct
from typing import Any

import h11
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.responses import Response

from genbatch.actors.gateways.accepting import Seat
from genbatch.actors.gateways.http import http_gateway
from genbatch.actors.gateways.http.bodies import Refusal, api_response
from genbatch.actors.gateways.http.http_gateway import HTTPConnection, Peers
from tests.actors.gateways.http.serving import ServedHTTP, served_http
from tests.actors.gateways.http.test_doors import Talking
from tests.waiting import received_until

pytestmark = pytest.mark.trio

USER = [{"role": "user", "content": "to be"}]
COMPLETION = "/v1/completions"
# Of each API: a path, a body that is streamed, and the end of the stream.
STREAMS: list[tuple[str, dict[str, Any], bytes]] = [
    (COMPLETION, {"prompt": "to be"}, b"data: [DONE]\n\n"),
    ("/v1/chat/completions", {"messages": USER}, b"data: [DONE]\n\n"),
    ("/v1/responses", {"input": "to be"}, b"response.completed"),
    ("/v1/messages", {"messages": USER, "max_tokens": 9}, b"message_stop"),
]
GET = "GET /health HTTP/1.1\r\nHost: localhost\r\n"


def post(path: str, body: dict[str, Any], version: str = "1.1", *headers: str) -> bytes:
    """A request's bytes."""
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def read_all(connection: trio.SocketStream) -> bytes:
    """All bytes until the service closes the connection."""
    answer = b""
    while part := await connection.receive_some():
        answer += part
    return answer


async def exchange(served: ServedHTTP, request: bytes) -> bytes:
    """Everything that the service says to `request` until it closes the connection."""
    async with await trio.open_tcp_stream("127.0.0.1", served.port) as connection:
        await connection.send_all(request)
        return await read_all(connection)


@pytest.mark.parametrize(("path", "body", "end"), STREAMS)
@pytest.mark.parametrize(
    ("version", "headers"),
    [("1.1", ("Connection: close",)), ("1.0", ()), ("1.0", ("Connection: keep-alive",))],
)
async def test_a_streams_connection_is_closed_after_its_last_event(
    path: str, body: dict[str, Any], end: bytes, version: str, headers: tuple[str, ...]
) -> None:
    async with served_http(batcher=Talking()) as served:
        answer = await exchange(served, post(path, body | {"stream": True}, version, *headers))
    assert answer.startswith(b"HTTP/1.1 200 ") and end in answer
    assert (b"\r\ntransfer-encoding: chunked\r\n" in answer.lower()) == (version == "1.1")
    assert answer.endswith(b"0\r\n\r\n") == (version == "1.1")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_kept_connection_serves_the_next_request_and_ends_when_it_has_been_idle(
    stream: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with served_http() as served, await trio.open_tcp_stream("127.0.0.1", served.port) as client:
        for _ in range(2):
            await client.send_all(post(COMPLETION, {"prompt": "a", "stream": stream}))
            answer = b""
            while not answer.endswith(b"0\r\n\r\n" if stream else b"}"):
                answer += await client.receive_some()
        before = trio.current_time()
        assert await read_all(client) == b""
        assert trio.current_time() - before == pytest.approx(http_gateway.IDLE_S)


async def test_headers_have_a_time_in_which_they_must_arrive(autojump_clock: trio.testing.MockClock) -> None:
    async with served_http() as served, await trio.open_tcp_stream("127.0.0.1", served.port) as client:
        with trio.move_on_after(http_gateway.IDLE_S):
            for byte in GET.encode():
                await client.send_all(bytes([byte]))
                await trio.sleep(1.0)
        answer = await read_all(client)
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"timeout"' in answer


async def test_between_the_tiny_chunks_of_a_body_other_tasks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_row, most, next_part = 0, 0, HTTPConnection._next_part

    async def count(connection: HTTPConnection) -> Any:
        nonlocal in_a_row, most
        in_a_row += 1
        most = max(most, in_a_row)
        return await next_part(connection)

    async def others() -> None:
        nonlocal in_a_row
        while True:
            in_a_row = 0
            await trio.lowlevel.checkpoint()

    monkeypatch.setattr(HTTPConnection, "_next_part", count)
    head, content = post(COMPLETION, {"prompt": "a " * 2000}).split(b"\r\n\r\n")
    chunked = head.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    async with served_http() as served, trio.open_nursery() as nursery:
        nursery.start_soon(others)
        answer = await exchange(served, chunked + chunks + b"0\r\n\r\n")
        nursery.cancel_scope.cancel()
    assert answer.startswith(b"HTTP/1.1 200 ") and 0 < most < 20


# The versions of HTTP


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, RESET = b"\0\0\0\4\0\0\0\0\0", b"\0\0\4\3\0\0\0\0\1\0\0\0\0"


@pytest.mark.parametrize("version", ["0.9", "1.2", "2.0", "3.0"])
async def test_other_versions_are_refused_and_the_connection_is_closed(version: str) -> None:
    async with served_http() as served:
        answer = await exchange(served, GET.replace("1.1", version).encode() + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 505 ") and b'"http_version"' in answer
    assert b"\r\nconnection: close\r\n" in answer.lower()


async def test_the_preface_of_http_2_is_refused_whatever_follows() -> None:
    async with served_http() as served:
        answer = await exchange(served, PREFACE + SETTINGS + RESET * 100)
        assert answer.startswith(b"HTTP/1.1 505 ") and answer.count(b"date: ") == 1
        assert not served.batcher.requests


@pytest.mark.parametrize(
    "upgrade", ["h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA", "websocket\r\nSec-WebSocket-Key: AAAA", "TLS/1.0"]
)
async def test_no_connection_is_upgraded_and_the_guard_is_asked_all_the_same(upgrade: str) -> None:
    wish = f"Connection: Upgrade\r\nUpgrade: {upgrade}\r\n"
    async with served_http() as served:
        head = f"{GET}{wish}\r\n{GET}Connection: close\r\n\r\n"
        answer = await exchange(served, head.encode())
        assert answer.count(b"HTTP/1.1 200 OK\r\n") == 2 and b" 101 " not in answer
        head = f"{GET}Connection: close, Upgrade\r\nUpgrade: {upgrade}\r\n\r\n".replace("localhost", "evil.example")
        assert (await exchange(served, head.encode())).startswith(b"HTTP/1.1 403 ")


# Where a request ends, and other borders


CHUNKED = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
BODY = b'{"prompt":"a"}'
CLOSE = b"Connection: close\r\n\r\n"
CHUNK = b"e\r\n" + BODY + b"\r\n0\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(CHUNKED.encode() + b"\r\n" + CHUNK + b"\r\n", 200, id="chunked"),
        pytest.param(CHUNKED.encode() + b"\r\n" + CHUNK + b"Trailer: x\r\n\r\n", 200, id="trailer"),
        pytest.param(CHUNKED.encode() + b"\r\ne;a=b;c\r\n" + BODY + b"\r\n0\r\n\r\n", 200, id="chunk extension"),
        pytest.param(CHUNKED.encode() + b"\r\ne;" + b"a" * 2**17, 431, id="huge chunk extension"),
        pytest.param(CHUNKED.encode() + b"\r\n" + CHUNK + b"T: " + b"a" * 2**17, 431, id="huge trailer"),
        pytest.param(CHUNKED.encode() + b"\r\nzz\r\n", 400, id="no chunk size"),
        pytest.param(CHUNKED.encode() + b"\r\n-1\r\n", 400, id="negative chunk size"),
        pytest.param(CHUNKED.encode() + b"\r\nf\r\n" + BODY + b"\r\n0\r\n\r\n", 400, id="chunk too short"),
        pytest.param(CHUNKED.encode() + b"Content-Length: 14\r\n\r\n" + CHUNK + b"\r\n", 400, id="two framings"),
        pytest.param(CHUNKED.encode() + b"Content-Length: 0\r\n\r\n" + CHUNK + b"\r\n", 400, id="two framings, empty"),
        pytest.param(CHUNKED.replace("1.1", "1.0").encode() + b"\r\n" + CHUNK + b"\r\n", 400, id="chunked in 1.0"),
        pytest.param(CHUNKED.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK, 501, id="chunked twice"),
        pytest.param(CHUNKED.replace("chunked", "gzip").encode() + b"\r\n" + CHUNK, 501, id="another coding"),
        pytest.param(post(COMPLETION, {"prompt": "a"}, "1.1", "Content-Length: 3"), 400, id="two lengths"),
        pytest.param(post(COMPLETION, {"prompt": "a"}).replace(b"Length: 1", b"Length: -1"), 400, id="length < 0"),
        pytest.param(post(COMPLETION, {"prompt": "a"}).replace(b"Length: 1", b"Length: +1"), 400, id="length signed"),
        pytest.param(post(COMPLETION, {}).replace(b"Length: 2", b"Length: " + b"9" * 5000), 400, id="length of digits"),
        pytest.param(f"{GET}X: a\r\n b\r\nConnection: close\r\n\r\n".encode(), 200, id="folded header"),
        pytest.param(b"GET /health HTTP/1.1\r\n X: a\r\nHost: localhost\r\n\r\n", 400, id="folded first header"),
        pytest.param(f"{GET}Connection: close\r\n\r\n".replace("\r\n", "\n").encode(), 200, id="bare line feeds"),
        pytest.param(f"{GET}X : a\r\n\r\n".encode(), 400, id="space before colon"),
        pytest.param(f"{GET}X: a\0b\r\n\r\n".encode(), 400, id="NUL"),
        pytest.param(f"{GET}X: a\rb\r\n\r\n".encode(), 400, id="bare carriage return"),
        pytest.param(f"{GET}X: ".encode() + b"a" * 2**17, 431, id="huge header"),
        pytest.param(b"GET /" + b"a" * 2**17, 431, id="huge target"),
        pytest.param(b"GET /health HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"GET /health HTTP/1.0\r\n\r\n", 200, id="a probe over HTTP/1.0"),
        pytest.param(b"GET /health\r\n\r\n", 400, id="HTTP/0.9"),
        pytest.param(b"GET /h\xffalth HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, id="target is not ASCII"),
        pytest.param(b"GET /%ff%00 HTTP/1.1\r\nHost: localhost\r\n" + CLOSE, 404, id="odd target"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400, id="a TLS handshake"),
        pytest.param(b"\r\n\r\n", 400, id="empty lines"),
        pytest.param(b"\x94\0\1\xa4stop\x90" * 50_000, 431, id="msgpack"),
        pytest.param(b"GET http://localhost/health HTTP/1.1\r\nHost: a\r\n" + CLOSE, 200, id="absolute"),
        pytest.param(b"GET http://localhost?x HTTP/1.1\r\nHost: a\r\n" + CLOSE, 200, id="no path"),
        pytest.param(b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n" + CLOSE,
                     403, id="absolute, another host"),
        pytest.param(b"GET http://[/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, id="absolute, no address"),
        pytest.param(b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n" + CLOSE, 404, id="CONNECT"),
        pytest.param(b"TRACE /health HTTP/1.1\r\nHost: localhost\r\n" + CLOSE, 405, id="TRACE"),
        pytest.param(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n" + CLOSE, 404, id="OPTIONS *"),
        pytest.param(b"OPTIONS /stats HTTP/1.1\r\nHost: localhost\r\n" + CLOSE, 405, id="OPTIONS"),
    ],
)  # fmt: skip
async def test_a_strange_request_gets_a_right_answer_or_a_typed_error_and_the_connection_ends(
    request_bytes: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with served_http() as served:
        answer = await exchange(served, request_bytes)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"\r\nconnection: close" in head.lower() and b"\r\ndate: " in head
        if status != 200:
            assert json.loads(body)["error"]["code"]
        assert len(served.batcher.requests) == (status == 200 and b"POST" in request_bytes)
    assert not [record for record in caplog.records if record.exc_info]


async def test_head_has_the_headers_of_get_and_no_body() -> None:
    async with served_http() as served:
        get = await exchange(served, f"{GET}Connection: close\r\n\r\n".encode())
        head = await exchange(served, f"{GET}Connection: close\r\n\r\n".replace("GET", "HEAD").encode())
    assert _without_date(get).startswith(_without_date(head)) and head.endswith(b"\r\n\r\n")
    assert len(get) > len(head)


def _without_date(answer: bytes) -> bytes:
    head, _, rest = answer.partition(b"\r\ndate: ")
    return head + rest.partition(b"\r\n")[2]


async def test_pipelined_requests_are_answered_one_after_another() -> None:
    async with served_http() as served:
        requests = [post(COMPLETION, {"prompt": f"n{number}", "stream": bool(number % 2)}) for number in range(20)]
        answer = await exchange(served, b"".join(requests) + f"{GET}Connection: close\r\n\r\n".encode())
    places = [answer.index(f'"n{number}"'.encode()) for number in range(20)]
    assert places == sorted(places) and answer.count(b"HTTP/1.1 200 ") == 21


@pytest.mark.parametrize("path", [COMPLETION, "/nowhere"])
async def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on(path: str) -> None:
    async with served_http() as served, await trio.open_tcp_stream("127.0.0.1", served.port) as client:
        content = post(path, {"prompt": "a"}, "1.1", "Expect: 100-continue", "Connection: close")
        head, _, body = content.partition(b"\r\n\r\n")
        await client.send_all(head + b"\r\n\r\n")
        assert (await received_until(client, b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        await client.send_all(body)
        assert (await read_all(client)).startswith(b"HTTP/1.1 200 " if path == COMPLETION else b"HTTP/1.1 404 ")


async def test_a_client_that_asks_and_is_refused_need_not_send_its_body() -> None:
    async with served_http() as served:
        content = post(COMPLETION, {"prompt": "a"}, "1.1", "Expect: 100-continue")
        head, _, _ = content.replace(b"localhost", b"evil.example").partition(b"\r\n\r\n")
        async with await trio.open_tcp_stream("127.0.0.1", served.port) as client:
            await client.send_all(head + b"\r\n\r\n")
            answer = await received_until(client, b"}}")
            assert answer.startswith(b"HTTP/1.1 403 ") and b"\r\nconnection: close" in answer.lower()
            await client.send_eof()
            assert await read_all(client) == b""


# Clients that send no more, and clients that are gone


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(("path", "body", "end"), STREAMS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_sends_no_more_gets_its_answer(
    path: str, body: dict[str, Any], end: bytes, stream: bool, version: str
) -> None:
    async with served_http(batcher=Talking()) as served, await trio.open_tcp_stream("127.0.0.1", served.port) as client:
        await client.send_all(post(path, body | {"stream": stream}, version))
        await client.send_eof()
        answer = await read_all(client)
    assert b"HTTP/1.1 200 " in answer and (end in answer if stream else b"tobe" in answer), answer
    assert version == "1.1" or answer.startswith(b"HTTP/1.1 200 "), "HTTP/1.0 has no interim responses"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shown", ["", "shown"])
async def test_a_client_that_sends_no_more_gets_an_answer_that_takes_long(
    version: str, stream: bool, shown: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with served_http() as served, await trio.open_tcp_stream("127.0.0.1", served.port) as client:
        await client.send_all(post(COMPLETION, {"prompt": "hold", "stream": stream}, version))
        held = await served.batcher.arrival("hold")
        if shown:
            held.emit(shown)
        await client.send_eof()
        await trio.sleep(20)
        assert not served.batcher.freed, "it may still read"
        held.emit("the rest")
        held.finish()
        answer = await read_all(client)
    assert b"HTTP/1.1 200 " in answer and b"the rest" in answer and b'"finish_reason":"stop"' in answer
    assert version == "1.1" or (answer.startswith(b"HTTP/1.1 200 ") and b" 102 " not in answer), answer


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_sends_no_more_and_goes_later_is_noticed(
    version: str, stream: bool, reads: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with served_http() as served:
        client = await trio.open_tcp_stream("127.0.0.1", served.port)
        await client.send_all(post(COMPLETION, {"prompt": "hold", "stream": stream}, version))
        held = await served.batcher.arrival("hold")
        if stream:
            held.emit("shown")
            await received_until(client, b"shown")
        await client.send_eof()
        with trio.move_on_after(20) as reading:
            while reads and await client.receive_some(4096):  # all of it: no unread byte tells the service of the end
                pass
            await trio.sleep_forever()
        assert reading.cancelled_caught and not served.batcher.freed, "it may still read"
        await client.aclose()
        await served.batcher.release("hold")


@pytest.mark.parametrize(
    "sent", [GET[:30].encode(), post(COMPLETION, {"prompt": "a"})[:-3], CHUNKED.encode() + b"\r\ne\r\n{"]
)
async def test_a_request_that_ends_in_the_middle_is_a_typed_error(sent: bytes) -> None:
    async with served_http() as served, await trio.open_tcp_stream("127.0.0.1", served.port) as client:
        await client.send_all(sent)
        await client.send_eof()
        answer = await read_all(client)
        assert answer.startswith(b"HTTP/1.1 400 ") and b'"malformed_http"' in answer
        assert not served.batcher.requests


async def test_a_reset_in_the_middle_of_a_body_is_no_fault_of_the_service(caplog: pytest.LogCaptureFixture) -> None:
    async with served_http() as served:
        client = await trio.open_tcp_stream("127.0.0.1", served.port)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await client.send_all(post(COMPLETION, {"prompt": "a"})[:-3])
        await trio.testing.wait_all_tasks_blocked()
        await client.aclose()
        while served.gateway._connections:
            await trio.lowlevel.checkpoint()
        assert (await served.complete("a")).status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_idle_connection_ends_with_the_gateway_and_a_busy_one_after_its_answer() -> None:
    async with (
        served_http() as served,
        await trio.open_tcp_stream("127.0.0.1", served.port) as idle,
        await trio.open_tcp_stream("127.0.0.1", served.port) as busy,
    ):
        await busy.send_all(post(COMPLETION, {"prompt": "hold"}))
        await served.batcher.arrival("hold")
        while len(served.gateway._connections) < 2:
            await trio.lowlevel.checkpoint()
        served.gateway_scope.cancel()
        assert await read_all(idle) == b""
        answer = await read_all(busy)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nconnection: close" in answer.lower()


# Without a service


async def serve_bytes(app: Any, data: bytes, split: int) -> bytes:
    """What a connection says to bytes that come in two parts and end."""
    ours, theirs = trio.testing.memory_stream_pair()
    with trio.socket.socket() as unused:
        seat = Seat({}, lambda: None)
        served = HTTPConnection(ours, unused, app, Peers("http", None, None), seat)
        answer = b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.serve)
            for part in (data[:split], data[split:]):
                if part:
                    await theirs.send_all(part)
            await theirs.send_eof()
            answer = bytes(await _drained(theirs))
    return answer


async def _drained(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([part async for part in stream])


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body."""
    body, more = b"", True
    try:
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
    except Refusal as error:
        await api_response(error)(scope, receive, send)
        return
    await Response(body, media_type="text/plain")(scope, receive, send)


async def test_a_client_that_does_not_read_is_cut_off(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.lockstep_stream_pair()
    ends: list[float] = []

    async def talk(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        await send({"type": "http.response.body", "body": b"never read", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": b"dropped"})
        ends.append(trio.current_time())

    with trio.socket.socket() as unused:
        served = HTTPConnection(ours, unused, talk, Peers("http", None, None), Seat({}, lambda: None))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.serve)
            await theirs.send_all(f"{GET}\r\n".encode())
    assert ends == [pytest.approx(http_gateway.STALLED_S)]


async def test_an_application_that_fails_ends_its_own_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        raise ValueError

    answer = await serve_bytes(fail, f"{GET}\r\n{GET}\r\n".encode(), 5)
    assert answer.endswith(b"begun") and answer.count(b"HTTP/1.1") == 1
    assert [record.message for record in caplog.records if record.exc_info] == ["a request failed"]


async def test_an_application_that_fails_before_it_answers_is_a_typed_error() -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError

    answer = await serve_bytes(fail, f"{GET}\r\n{GET}\r\n".encode(), 5)
    assert answer.startswith(b"HTTP/1.1 500 ") and b'"engine_error"' in answer and answer.count(b"HTTP/1.1") == 1


SEEDS = (
    f"{GET}\r\n".replace("GET", "HEAD").encode() + b"\n",
    f"{GET}\r\n".encode() * 2,
    post(COMPLETION, {"prompt": "a"}),
    post(COMPLETION, {"prompt": "a"}, "1.0"),
    CHUNKED.encode() + b"\r\n" + CHUNK + b"\r\n",
    PREFACE + SETTINGS,
    post("/", {}, "1.1", "Expect: 100-continue") + f"{GET}Upgrade: h2c\r\nConnection: upgrade\r\n\r\n".encode(),
)
PIECES = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b":",
    b"HTTP/1.0",
    b"chunked",
    b"9" * 30,
    b"Content-Length: 1\r\n",
    b"\xff",
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.sampled_from(SEEDS),
    edits=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3), st.sampled_from(PIECES)), max_size=4),
    split=st.integers(0, 300),
)
async def test_whatever_comes_each_answer_is_well_formed_and_the_connection_ends(
    seed: bytes, edits: list[tuple[int, int, bytes]], split: int, caplog: pytest.LogCaptureFixture
) -> None:
    for place, removed, piece in edits:
        place %= len(seed) + 1
        seed = seed[:place] + piece + seed[place + removed :]
    answer = await serve_bytes(echo, seed, split)
    reader = h11.Connection(h11.CLIENT)
    reader.receive_data(answer)
    reader.receive_data(b"")
    statuses = []
    while answer:
        if reader.our_state is h11.IDLE:
            reader.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
            reader.send(h11.EndOfMessage())
        event = reader.next_event()
        if isinstance(event, h11.Response):
            statuses.append(event.status_code)
        elif isinstance(event, h11.EndOfMessage):
            if reader.their_state is not h11.DONE or not reader.trailing_data[0]:
                break
            reader.start_next_cycle()
    assert set(statuses) <= {200, 400, 431, 501, 505}
    assert not reader.trailing_data[0], "no bytes after the last answer"
    assert not [record for record in caplog.records if record.exc_info]
