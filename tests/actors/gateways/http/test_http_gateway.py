"""What reaches an endpoint, what is refused on the way, and how connections end."""

import gzip
import json
import shutil
import ssl
import subprocess
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import trio
import trio.testing
from starlette.applications import Starlette

from genbatch.actors.gateways.accepting import MessageBudget
from genbatch.actors.gateways.addresses import check_http
from genbatch.actors.gateways.http import generating, http_gateway, service_calls
from genbatch.actors.gateways.http.service_calls import Front
from genbatch.actors.security.curve_keys import KeyStore
from genbatch.actors.security.key_files import InsecureBind, TokenFile, server_context
from genbatch.actors.security.security import Security
from genbatch.proto.errors import DeadlineExceeded, EngineError, Forbidden, GenbatchError, Unavailable
from genbatch.proto.messages import Choice, Result, Usage
from genbatch.proto.service_messages import Health
from tests.actors.gateways.http.serving import served_http
from tests.actors.gateways.scripted_batcher import PATIENCE_S, ScriptedBatcher
from tests.waiting import a_moment, received_until

USER = [{"role": "user", "content": "x"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.mark.trio
@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, b"{", None, "malformed_message"),
        (CHAT, b"\xff", None, "malformed_message"),
        (CHAT, b'{"messages":[],"messages":[]}', None, "malformed_message"),
        (CHAT, b'{"temperature":NaN}', None, "malformed_message"),
        (CHAT, b'{"seed":' + b"9" * 5000 + b"}", None, "malformed_message"),
        (CHAT, b"[" * 50_000, None, "malformed_message"),
        (CHAT, b'{"messages":' + b"[" * 100 + b"]" * 100 + b"}", None, "malformed_message"),
        (CHAT, b"[]", None, "invalid_request"),
        (CHAT, b"{}", "messages", "invalid_request"),
        (CHAT, {"messages": []}, "messages", "invalid_request"),
        (CHAT, {"messages": USER, "n": True}, "n", "invalid_request"),
        (CHAT, {"messages": USER, "n": 0}, "n", "invalid_request"),
        (CHAT, {"messages": USER, "temperature": "hot"}, "temperature", "invalid_request"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function", "invalid_request"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs", "invalid_request"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 99}, "top_logprobs", "invalid_request"),
        (CHAT, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens", "invalid_request"),
        (CHAT, {"messages": USER, "stream_options": {}}, "stream_options", "invalid_request"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "invalid_request"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "invalid_request"),
        (CHAT, {"messages": [{"role": "\ud800", "content": "x"}]}, "messages[0].role", "invalid_request"),
        (CHAT, {"messages": USER, "response_format": {"type": "\ud800"}}, None, "invalid_request"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "invalid_request",
        ),
        (COMPLETION, {"prompt": ""}, "prompt", "invalid_request"),
        (COMPLETION, {"prompt": []}, "prompt", "invalid_request"),
        (COMPLETION, {"prompt": [1, -2]}, "prompt[1]", "invalid_request"),
        (COMPLETION, {"prompt": ["a", 1]}, "prompt", "invalid_request"),
        (COMPLETION, {"prompt": "a", "stop": [""]}, "stop[0]", "invalid_request"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "invalid_request"),
        (COMPLETION, b'{"prompt":"a","logit_bias":{"1":1e999}}', "logit_bias[1]", "invalid_request"),
        (COMPLETION, {"prompt": "a", "best_of": 3}, "best_of", "invalid_request"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "invalid_request"),
        ("/tokenize", {"prompt": 7}, "prompt", "invalid_request"),
    ],
)
async def test_a_bad_body_is_answered_with_the_name_of_its_fault_and_the_connection_lives(
    path: str, body: bytes | dict[str, Any], param: str | None, code: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with served_http() as served:
        for stream in (False, True):
            if stream and isinstance(body, dict) and path.startswith("/v1") and "stream_options" not in body:
                content = json.dumps(body | {"stream": True}).encode()
            response = await served.client.post(path, content=content)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
            assert error["message"]
        assert (await served.complete("still there")).json()["choices"][0]["text"] == "stillthere"
        assert len(served.gateway._connections) == 1


@pytest.mark.trio
async def test_what_is_not_here_is_said_in_the_same_shape() -> None:
    async with served_http() as served:
        for method, path, status, code in (
            ("GET", "/v1/chat", 404, "not_found"),
            ("GET", "/health/", 404, "not_found"),
            ("GET", CHAT, 405, "method_not_allowed"),
            ("POST", "/v1/embeddings", 404, "no_embeddings"),
            ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
            ("GET", "/../pyproject.toml", 404, "not_found"),
        ):
            body = {"input": "a"} if path == "/v1/embeddings" else None
            response = await served.client.request(method, path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert (await served.client.get(CHAT)).headers["allow"] == "POST"
        assert len((await served.client.get("/x" * 5000)).content) < 500, "a path of any length is sent back"


@pytest.mark.trio
async def test_a_body_that_is_too_large_is_refused_even_where_no_endpoint_is() -> None:
    async with served_http() as served:
        for path in (COMPLETION, "/nowhere"):
            response = await served.client.post(path, content=b" " * (service_calls.MAX_BODY_BYTES + 1))
            assert (response.status_code, response.json()["error"]["code"]) == (413, "frame_too_large")
        # Several times what the server's queue of body parts holds.
        response = await served.client.post("/nowhere", content=b" " * service_calls.MAX_BODY_BYTES)
        assert response.status_code == 404


@pytest.mark.trio
async def test_a_body_without_end_does_not_keep_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_gateway, "MAX_UNREAD_BYTES", 1)
    async with served_http() as served, await trio.open_tcp_stream("127.0.0.1", served.port) as client:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {10**9}\r\n\r\n"
        with pytest.raises(trio.BrokenResourceError):
            await client.send_all(head.encode())
            while True:
                await client.send_all(b" " * 2**16)
        while len(served.gateway._connections):
            await trio.lowlevel.checkpoint()


@pytest.mark.trio
async def test_a_page_of_another_site_reaches_nothing() -> None:
    async with served_http() as served:
        for headers in (
            {"Host": "evil.example"},
            {"Host": f"evil.example:{served.port}"},
            {"Host": "127.0.0.1.evil.example"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Origin": f"http://localhost:{served.port + 1}"},
        ):
            response = await served.client.post(COMPLETION, json={"prompt": "a"}, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
        assert not served.batcher.requests
        for name in ("localhost", "127.0.0.1", "[::1]"):
            same = f"{name}:{served.port}"
            headers = {"Host": same, "Origin": f"http://{same}"}
            assert (await served.client.post(COMPLETION, json={"prompt": "a"}, headers=headers)).status_code == 200
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.trio
async def test_a_token_opens_the_service_in_the_name_it_goes_with(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    token = store.new_token("alice")
    async with served_http(Security(tokens=TokenFile(store.tokens))) as served:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {token}"}):
            for path in (CHAT, "/v1/models", "/stats", "/metrics", "/tokenize"):
                response = await served.client.request("POST", path, content=b"{", headers=headers)
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
                hint = "genbatch keys token" if "wrong" in str(headers) else "send the header Authorization: Bearer"
                assert hint in response.json()["error"]["message"]
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.client.get("/")).status_code == 200
        served.client.headers["Authorization"] = f"Bearer {token}"
        assert (await served.complete("a")).status_code == 200
        assert served.batcher.requests[0].request.tenant == "alice"
        assert served.batcher.requests[0].client == "tenant:alice"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    paths = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=genbatch", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-out", str(paths[0]), "-keyout", str(paths[1])], check=True, capture_output=True)
    paths[1].chmod(0o600)
    return paths


@pytest.mark.trio
async def test_a_certificate_makes_it_https(certificate: tuple[Path, Path]) -> None:
    trusting = ssl.create_default_context(cafile=certificate[0])
    async with served_http(Security(tls=server_context(*certificate))) as served:
        assert served.gateway.address.startswith("https://127.0.0.1:")
        options: Any = {"verify": trusting, "trust_env": False, "timeout": PATIENCE_S}
        async with httpx2.AsyncClient(base_url=served.gateway.address, **options) as client:
            body = {"prompt": "over there", "stream": True}
            response = await client.post(COMPLETION, json=body)
            assert response.text.endswith("data: [DONE]\n\n")
        plain = f"http://127.0.0.1:{served.port}/health"
        with pytest.raises(httpx2.TransportError):
            await served.client.get(plain)


@pytest.mark.trio
async def test_what_fails_behind_the_gateway_has_its_status_and_says_whether_to_come_again() -> None:
    async with served_http() as served:
        response = await served.complete("fault")
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
        assert response.headers["retry-after-ms"] == "5"
        assert response.headers["retry-after"] == "1"
        response = await served.complete("bug")
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.headers["x-should-retry"] == "false"
        await served.ref.stop()
        response = await served.complete("a")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert response.headers["retry-after-ms"] == "500"


@pytest.mark.trio
async def test_health_is_503_unless_new_requests_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served_http() as served:
        assert (await served.client.get("/health")).status_code == 200
        answers = iter(("draining", "stuck"))

        def answer(request: Any) -> Health:
            return Health(status=next(answers), steps=1, requests_running=1, requests_waiting=0, stalled_s=40.0)

        monkeypatch.setattr(served.batcher, "_answer", answer)
        for status in ("draining", "stuck"):
            response = await served.client.get("/health")
            assert (response.status_code, response.json()["status"]) == (503, status)
        await served.ref.stop()
        response = await served.client.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "down")


@pytest.mark.trio
async def test_a_service_that_says_nothing_is_down(autojump_clock: trio.testing.MockClock) -> None:
    class Silent:
        async def call(self, *args: object, **options: object) -> object:
            await trio.sleep_forever()
            raise AssertionError

    health = await service_calls.HTTPCalls(Silent()).health()  # type: ignore[arg-type]
    assert health.status == "down"
    assert trio.current_time() == pytest.approx(service_calls.HEALTH_TIMEOUT_S)


async def _emit_first(batcher: ScriptedBatcher) -> None:
    (await batcher.arrival("hold")).emit("a")


async def _read_text(lines: Any) -> str:
    event = await _read_event(lines)
    assert event is not None
    text: str = event["choices"][0]["text"]
    return text


async def _read_event(lines: Any) -> dict[str, Any] | None:
    async for line in lines:
        if line.startswith("data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            return event
    return None


@pytest.mark.trio
async def test_tokens_are_sent_as_they_come() -> None:
    async with served_http() as served, trio.open_nursery() as nursery:
        nursery.start_soon(_emit_first, served.batcher)
        body = {"prompt": "hold", "stream": True}
        async with served.client.stream("POST", COMPLETION, json=body) as response:
            lines = response.aiter_lines()
            assert await _read_text(lines) == "a"
            held = served.batcher.held["hold"]
            held.emit("b")
            assert await _read_text(lines) == "b"
            for text in "cdefghijklmnopqrstuvwxyz":
                held.emit(text)
            # More than 16 that come at once share an event.
            assert await _read_text(lines) == "cdefghijklmnopqrstuvwxyz"
            held.finish()
            event = await _read_event(lines)
            assert event is not None
            assert event["choices"][0]["finish_reason"] == "stop"
            assert await _read_event(lines) is None


@pytest.mark.trio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_sequence(stream: bool) -> None:
    async with served_http() as served:
        connection = await trio.open_tcp_stream("127.0.0.1", served.port)
        body = json.dumps({"prompt": "hold", "stream": stream}).encode()
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        await connection.send_all(head.encode() + body)
        await served.batcher.arrival("hold")
        await connection.aclose()
        await served.batcher.release("hold")


@pytest.mark.trio
async def test_one_prompt_of_several_that_fails_ends_the_others() -> None:
    async with served_http() as served, trio.open_nursery() as nursery:

        async def fail_second() -> None:
            await served.batcher.arrival("hold")
            (await served.batcher.arrival("hold too")).fail(EngineError("the step failed"))

        nursery.start_soon(fail_second)
        response = await served.client.post(COMPLETION, json={"prompt": ["hold", "hold too"]})
        assert response.status_code == 500
        await served.batcher.release("hold")


@pytest.mark.trio
async def test_a_stop_of_the_gateway_ends_streams_with_a_word() -> None:
    async with served_http() as served:
        body = {"prompt": "hold", "stream": True}

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_emit_first, served.batcher)
            async with served.client.stream("POST", COMPLETION, json=body) as response:
                lines = response.aiter_lines()
                assert await _read_event(lines)
                served.gateway_scope.cancel()
                event = await _read_event(lines)
                assert event is not None
                assert event["error"]["code"] == "unavailable"
                assert await _read_event(lines) is None
        await served.batcher.release("hold")
        with pytest.raises(httpx2.TransportError):
            await served.client.get("/health")


@pytest.mark.trio
async def test_a_reader_that_falls_too_far_behind_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generating, "MAX_WAITING", 64)
    # Longer than the test: it is not the connection's own patience that ends this.
    monkeypatch.setattr(http_gateway, "STALLED_S", 3600.0)
    async with served_http() as served:
        body = json.dumps({"prompt": "hold", "stream": True}).encode()
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client = await trio.open_tcp_stream("127.0.0.1", served.port)
        async with client:
            await client.send_all(head.encode() + body)
            held = await served.batcher.arrival("hold")
            while "hold" in served.batcher.held:
                held.emit("x" * 10_000)
                await trio.lowlevel.checkpoint()
            await served.batcher.release("hold")
        assert (await served.complete("a")).status_code == 200


@pytest.mark.trio
async def test_more_connections_than_allowed_are_closed_while_each_has_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_gateway, "max_connections", lambda: 1)
    async with served_http() as served, trio.open_nursery() as nursery:
        answers: list[int] = []

        async def complete() -> None:
            answers.append((await served.complete("hold")).status_code)

        nursery.start_soon(complete)
        held = await served.batcher.arrival("hold")
        async with await trio.open_tcp_stream("127.0.0.1", served.port) as second:
            assert await second.receive_some() == b""
        assert not answers
        held.finish()
    assert answers == [200]


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.trio
async def test_a_newcomer_pushes_out_the_connection_that_has_been_without_a_request_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_gateway, "max_connections", lambda: 3)
    async with served_http() as served, AsyncExitStack() as stack:

        async def connect() -> trio.SocketStream:
            before = len(served.gateway._connections)
            stream = await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", served.port))
            while len(served.gateway._connections) == before:
                await trio.lowlevel.checkpoint()
            return stream

        async def answers(stream: trio.SocketStream) -> bool:
            await stream.send_all(GET)
            answer = b""
            while not answer.endswith(b"}"):
                part = await stream.receive_some()
                assert part, "closed in the place of an answer"
                answer += part
            await trio.testing.wait_all_tasks_blocked()  # the request has ended over there, too
            return answer.startswith(b"HTTP/1.1 200")

        async def is_closed(stream: trio.SocketStream) -> bool:
            try:
                return not await stream.receive_some()
            except trio.BrokenResourceError:  # before all that was sent had been read
                return True

        spoke, half, silent = [await connect() for _ in range(3)]
        assert await answers(spoke)  # so it is the one that was silent for the shortest time
        await half.send_all(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        fourth = await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", served.port))
        assert await is_closed(half)
        assert await answers(fourth)
        assert await answers(silent)
        assert await answers(spoke)
        # Whoever has had an answer is as silent as the others.
        for _ in range(3):
            stream = await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", served.port))
            assert await answers(stream)
        for stream in (fourth, silent, spoke):
            assert await is_closed(stream)


def test_other_machines_get_in_only_past_tokens_and_tls() -> None:
    for address in ("0.0.0.0:8000", "[::]:8000", "*:8000", "example.org:8000"):
        with pytest.raises(InsecureBind) as caught:
            check_http(address, Security())
        assert caught.value.lacking == ("tokens", "tls_cert", "tls_key")
    assert check_http(":8000", Security()).is_loopback
    # Whose operator says so, and who may still ask for a token.
    assert not check_http("0.0.0.0:8000", Security(http_insecure=True)).is_loopback


@pytest.mark.trio
async def test_a_byte_order_mark_is_read_and_a_compressed_body_is_refused_as_such() -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    async with served_http() as served:
        assert (await served.client.post("/v1/completions", content=b"\xef\xbb\xbf" + body)).status_code == 200
        refused = await served.client.post("/v1/completions", content=gzip.compress(body))
        assert refused.status_code == 400 and "a compressed body" in refused.json()["error"]["message"]


@pytest.mark.trio
async def test_other_names_of_the_service_are_allowed_by_name() -> None:
    async with served_http(Security(allowed_hosts=("chat.example",))) as served:
        for host, status in (
            ("chat.example", 200),
            ("CHAT.example:80", 200),
            ("127.0.0.1", 200),
            ("evil.example", 403),
        ):
            assert (await served.client.get("/v1/models", headers={"Host": host})).status_code == status
        assert "--allowed-host" in (await served.client.get("/stats", headers={"Host": "evil.example"})).text


@pytest.mark.parametrize(
    ("host", "path", "taken"), [("a:80", "/", True), ("b", "/", False), ("10.1.1.1", "/health", True), ("", "/", True)]
)
def test_on_a_network_only_allowed_names_are_taken_but_by_probes(host: str, path: str, taken: bool) -> None:
    front = Front(Starlette(), authenticate=None, only_loopback=False, hosts=["a"])
    with nullcontext() if taken else pytest.raises(Forbidden):
        front._check_host(host, path)
    Front(Starlette(), authenticate=None, only_loopback=False)._check_host(host, path)  # where none are named, all are


@pytest.mark.trio
async def test_pages_of_an_allowed_origin_may_use_the_service_and_others_may_not(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    token = store.new_token("alice")
    security = Security(tokens=TokenFile(store.tokens), allowed_origins=("https://chat.example/",))
    origin = {"Origin": "https://chat.example"}
    async with served_http(security) as served:
        asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        may = await served.client.options(CHAT, headers=asked)  # a browser shows no token when it asks
        assert may.status_code == 204
        assert may.headers["access-control-allow-origin"] == origin["Origin"]
        assert may.headers["access-control-allow-headers"] == "authorization"
        for headers, status in (({"Authorization": f"Bearer {token}"}, 200), ({}, 401)):
            answer = await served.client.get("/v1/models", headers={**origin, **headers})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin["Origin"])
        other = await served.client.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
        assert (
            await served.client.options(CHAT, headers={**asked, "Origin": "https://evil.example"})
        ).status_code != 204


@pytest.mark.trio
async def test_counters_have_an_address_of_their_own_without_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genbatch.actors.gateways.http.app.render", lambda stats: (str(stats).encode(), "text/plain"))
    store = KeyStore(tmp_path)
    store.new_token("alice")
    async with served_http(Security(tokens=TokenFile(store.tokens)), only_metrics=True) as served:
        assert "'steps': 7" in (await served.client.get("/metrics")).text
        assert (await served.client.get("/health")).status_code == 200
        for path in (CHAT, COMPLETION, "/v1/models", "/stats", "/tokenize", "/"):
            assert (await served.client.post(path, json={})).status_code == 404


def test_an_answer_that_failed_is_an_error() -> None:
    """OpenAI's clients know "stop" and "length": a 200 with another reason would be taken for a whole answer."""
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    whole = Choice(text="a", token_ids=[1], finish_reason="stop")
    cut = Choice(text="a", token_ids=[1], finish_reason="error")
    result = Result(text="a", token_ids=[1], finish_reason="stop", usage=usage, several=(whole, cut))
    with pytest.raises(EngineError):
        generating._finished(result)
    assert generating._finished(msgspec.structs.replace(result, several=(whole, whole)))


@pytest.mark.parametrize(("reason", "error"), [("cancelled", Unavailable), ("deadline", DeadlineExceeded)])
def test_an_answer_that_a_drain_or_a_deadline_cut_has_its_text_and_ends_as_its_length_does(
    reason: Any, error: type[GenbatchError]
) -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    whole = Choice(text="a", token_ids=[1], finish_reason="stop")
    cut = Choice(text="a", token_ids=[1], finish_reason=reason)
    result = Result(text="a", token_ids=[1], finish_reason=reason, usage=usage, several=(cut, whole))
    finished = generating._finished(result)
    assert (finished.text, finished.finish_reason) == ("a", "length")
    assert [choice.finish_reason for choice in finished.choices] == ["length", "stop"]
    with pytest.raises(error):  # nothing of it is there
        generating._finished(msgspec.structs.replace(result, usage=Usage(prompt_tokens=1, completion_tokens=0)))


@pytest.mark.trio
@pytest.mark.parametrize(
    "header",
    [b"Host: \xff\xfe", b"Host: [::1", b"Host: localhost:abc", b"Host: user@localhost", b"Host: a\r\nHost: b",
     b"Host: localhost\r\nOrigin: http://[", b"Host: localhost\r\nOrigin: \xff",
     b"Host: localhost\r\nAuthorization: Bearer \xff"],
)  # fmt: skip
async def test_odd_headers_are_answered_and_no_fault_of_the_service(
    header: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with served_http() as served, await trio.open_tcp_stream("127.0.0.1", served.port) as connection:
        await connection.send_all(b"GET /health HTTP/1.1\r\n" + header + b"\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := await connection.receive_some():
            answer += part
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 403", b"HTTP/1.1 200"))
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.trio
async def test_bodies_that_do_not_end_share_a_bound_which_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    room = MessageBudget(100_000)
    monkeypatch.setattr(service_calls, "MessageBudget", lambda _: room)
    monkeypatch.setattr(http_gateway, "MAX_UNREAD_S", 0.05)
    content = json.dumps({"prompt": "a b", "user": "x" * 30_000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    async with served_http() as served:
        for _ in range(2):  # as much room as before
            async with AsyncExitStack() as stack:
                clients = []
                for number in range(4):
                    client = await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", served.port))
                    clients.append(client)
                    await client.send_all(head + content[:-1])
                    while number < 3 and room.num_bytes < (number + 1) * (len(content) - 1):
                        await a_moment()
                told = await received_until(clients[0], b"unfinished bodies")
                assert told.startswith(b"HTTP/1.1 503 ") and b"retry-after-ms: " in told
                for client in clients[1:]:
                    await client.send_all(content[-1:])
                    assert (await received_until(client, b"finish_reason")).startswith(b"HTTP/1.1 200 ")
            assert room.num_bytes == 0


@pytest.mark.trio
@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/completions", b"invalid_request_error"), ("/v1/messages", b"timeout_error")]
)
async def test_who_begins_a_body_and_does_not_go_on_is_told_that_its_time_is_over(
    path: str, kind: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_calls, "BODY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(http_gateway, "MAX_UNREAD_S", 0.05)
    async with served_http() as served, await trio.open_tcp_stream("127.0.0.1", served.port) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{{"
        await client.send_all(head.encode())
        told = await received_until(client, kind)
        assert told.startswith(b"HTTP/1.1 408 ")
