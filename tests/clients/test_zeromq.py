"""The trio client against a real gateway with a scripted Batcher behind it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
import trio.testing
import zmq

from genbatch.actors.gateways.zeromq_socket import ZeroMQSocket, open_socket
from genbatch.clients import zeromq
from genbatch.clients.errors import ClientClosed, StreamNotEnded
from genbatch.clients.interface import Client
from genbatch.clients.zeromq import ZeroMQClient
from genbatch.proto.errors import EngineError, FrameTooLarge, InvalidRequest, MalformedMessage, Unavailable
from genbatch.proto.limits import REQUEST_LIMITS
from genbatch.proto.messages import Message, Result, Token, Usage
from tests.actors.gateways.scripted_batcher import served

pytestmark = pytest.mark.trio

# Stands in for a service that is killed: it takes requests and answers none.
DOOMED_SERVICE = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
while b"stream" not in socket.recv_multipart()[-1]:
    pass
print("asked", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def no_lease_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is freed here is freed because the client said so."""
    monkeypatch.setattr(zeromq, "LEASE_S", 60.0)


async def test_generate_returns_the_result(tmp_path: Path) -> None:
    async with served(tmp_path) as service, ZeroMQClient(service.address) as client:
        assert await client.generate("a b", max_tokens=9, temperature=0.5, stop="END") == Result(
            text="ab",
            token_ids=[100, 101],
            finish_reason="stop",
            usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
        )
        wanted = service.batcher.requests[0].request
        assert (wanted.max_tokens, wanted.temperature, wanted.stop) == (9, 0.5, ["END"])
        assert (await client.stats())["steps"] == 7


async def test_a_prompt_may_be_text_token_ids_or_messages(tmp_path: Path) -> None:
    async with served(tmp_path) as service, ZeroMQClient(service.address) as client:
        await client.generate([3, 4])
        await client.generate(messages=[{"role": "user", "content": "a"}, Message(role="assistant", content="b")])
        first, second = (generate.request for generate in service.batcher.requests)
        assert first.token_ids == [3, 4]
        assert second.messages == [Message(role="user", content="a"), Message(role="assistant", content="b")]


async def test_a_stream_yields_each_token_when_it_comes_then_has_the_result(tmp_path: Path) -> None:
    async with served(tmp_path) as service, ZeroMQClient(service.address) as client:
        async with client.stream("hold") as stream:
            held = await service.batcher.arrival("hold")
            tokens = aiter(stream)
            for index, word in enumerate(["a", "b", "c"]):
                held.emit(word)
                assert await anext(tokens) == Token(text=word, token_id=100 + index, index=index)
            with pytest.raises(StreamNotEnded):
                _ = stream.result
            held.finish()
            assert [token async for token in stream] == []
            assert stream.result == held.result()
        assert stream.result.text == "abc"
        assert service.batcher.freed == []


async def test_two_requests_of_one_client_run_at_once(tmp_path: Path) -> None:
    async with served(tmp_path) as service, ZeroMQClient(service.address) as client:
        texts: dict[str, str] = {}

        async def ask(prompt: str) -> None:
            texts[prompt] = (await client.generate(prompt)).text

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "hold 1")
            nursery.start_soon(ask, "hold 2")
            for prompt in ("hold 2", "hold 1"):  # not in the order of asking
                held = await service.batcher.arrival(prompt)
                held.emit(f"answer to {prompt}")
                held.finish()
        assert texts == {prompt: f"answer to {prompt}" for prompt in ("hold 1", "hold 2")}


async def test_cancelling_the_scope_frees_the_request(tmp_path: Path) -> None:
    async with served(tmp_path) as service, ZeroMQClient(service.address) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.generate, "hold")
            await service.batcher.arrival("hold")
            nursery.cancel_scope.cancel()
        await service.batcher.release("hold")
        assert (await client.generate("next")).text == "next"


async def test_leaving_a_stream_early_frees_the_request(tmp_path: Path) -> None:
    async with served(tmp_path) as service, ZeroMQClient(service.address) as client:
        async with client.stream("hold") as stream:
            (await service.batcher.arrival("hold")).emit("a")
            async for token in stream:
                assert token.text == "a"
                break
        await service.batcher.release("hold")


async def test_closing_the_client_frees_its_requests_and_ends_its_calls(tmp_path: Path) -> None:
    async with served(tmp_path) as service:
        failures: list[str] = []

        async def ask(client: ZeroMQClient) -> None:
            with pytest.raises(Unavailable) as info:
                await client.generate("hold")
            failures.append(info.value.message)

        async with trio.open_nursery() as nursery:
            async with ZeroMQClient(service.address) as client:
                nursery.start_soon(ask, client)
                await service.batcher.arrival("hold")
            await service.batcher.release("hold")
        assert failures == ["the client was closed"]
        with pytest.raises(ClientClosed):
            await client.generate("a")


async def test_errors_arrive_as_the_classes_they_are(tmp_path: Path) -> None:
    async with served(tmp_path) as service, ZeroMQClient(service.address) as client:
        with pytest.raises(EngineError, match="the step failed") as fault:
            await client.generate("fault")
        assert fault.value.retry_after_ms == 5
        with pytest.raises(InvalidRequest) as invalid:
            await client.generate("a", temperature=-1)
        assert invalid.value.field == "temperature"
        with pytest.raises(InvalidRequest) as empty:
            async with client.stream("") as stream:
                async for _ in stream:
                    pass
        assert empty.value.field == "prompt"
        with pytest.raises(EngineError):
            _ = [token async for token in _stream_of(client, "fault")]
        assert (await client.generate("fine")).text == "fine"


async def _stream_of(client: Client, prompt: str) -> Any:
    async with client.stream(prompt) as stream:
        async for token in stream:
            yield token


async def test_wrong_types_and_too_much_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with served(tmp_path) as service, ZeroMQClient(service.address) as client:
        with pytest.raises(InvalidRequest) as info:
            await client.generate("a", max_tokens="8")  # type: ignore[arg-type]
        assert info.value.field == "max_tokens"
        with pytest.raises(InvalidRequest) as info:
            await client.generate("a", max_token=8)  # type: ignore[call-arg]
        assert info.value.field == "max_token"
        with pytest.raises(FrameTooLarge):
            await client.generate("x" * REQUEST_LIMITS.max_bytes)
        assert service.batcher.requests == []


async def test_what_the_body_raises_comes_out_as_it_is(tmp_path: Path) -> None:
    async with served(tmp_path) as service:
        with pytest.raises(ZeroDivisionError):
            async with ZeroMQClient(service.address) as client, client.stream("hold"):
                raise ZeroDivisionError
        with pytest.raises(EngineError):
            async with ZeroMQClient(service.address) as client:
                await client.generate("fault")


async def test_nobody_at_the_address_is_unavailable_after_the_timeout(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path / 'nobody'}"
    async with ZeroMQClient(address, timeout=0.1) as client:
        with pytest.raises(Unavailable, match="no service answers"):
            await client.generate("a")
        with pytest.raises(Unavailable, match="no service answers"):
            await client.stats()


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:notaport"])
async def test_an_address_that_is_none_is_unavailable_at_once(address: str) -> None:
    with pytest.raises(Unavailable, match="no address"):
        async with ZeroMQClient(address):
            pass


async def test_a_service_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    async with ZeroMQClient(f"ipc://{tmp_path / 'socket'}") as client, trio.open_nursery() as nursery:
        results: list[Result] = []

        async def ask() -> None:
            results.append(await client.generate("a b"))

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        async with served(tmp_path):
            while not results:
                await trio.testing.wait_all_tasks_blocked(0.01)


async def test_a_service_that_stops_ends_open_calls(tmp_path: Path) -> None:
    async with served(tmp_path) as service, ZeroMQClient(service.address) as client, client.stream("hold") as stream:
        await service.batcher.arrival("hold")
        service.gateway_scope.cancel()
        with pytest.raises(Unavailable):
            async for _ in stream:
                pass


async def test_a_service_that_was_restarted_between_two_requests_is_found_again(tmp_path: Path) -> None:
    async with ZeroMQClient(f"ipc://{tmp_path / 'socket'}") as client:
        for prompt in ("before", "after"):
            async with served(tmp_path) as service:
                assert (await client.generate(prompt)).text == prompt
                assert [generate.request.prompt for generate in service.batcher.requests] == [prompt]


async def test_a_request_given_up_before_there_was_a_service_never_reaches_one(tmp_path: Path) -> None:
    async with ZeroMQClient(f"ipc://{tmp_path / 'socket'}", timeout=0.05) as client:
        for _ in range(5):
            with pytest.raises(Unavailable):
                await client.generate("stale")
        async with served(tmp_path) as service:
            client.timeout = 10.0
            await client.generate("fresh")
            assert [generate.request.prompt for generate in service.batcher.requests] == ["fresh"]


async def test_a_service_that_is_killed_ends_open_calls_at_once(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path / 'socket'}"
    command = [sys.executable, "-c", DOOMED_SERVICE, address]
    process = await trio.to_thread.run_sync(
        lambda: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        with trio.fail_after(20):
            async with ZeroMQClient(address, timeout=3600) as client, client.stream("hold") as stream:
                await trio.to_thread.run_sync(process.stdout.readline)
                os.kill(process.pid, signal.SIGKILL)
                with pytest.raises(Unavailable, match="was lost"):
                    async for _ in stream:
                        pass
    finally:
        process.kill()
        await trio.to_thread.run_sync(process.wait)
        process.stdin.close()
        process.stdout.close()


async def answer_with(router: ZeroMQSocket, messages: list[Any]) -> None:
    """Answers the first request with these messages, whatever they are."""
    while True:
        identity, data = await router.recv()
        if msgpack.unpackb(data)[0] == 0:
            for message in messages:
                await router.send([identity, msgpack.packb(message)])
            return


async def test_a_service_that_is_silent_for_the_timeout_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq, "HEARTBEAT_S", 0.02)
    async with open_socket(zmq.ROUTER) as silent, ZeroMQClient(f"ipc://{tmp_path / 's'}", timeout=0.2) as client:
        silent.bind(client.address)
        with pytest.raises(Unavailable, match="silent"):
            await client.generate("a")


async def test_a_service_that_is_heard_may_take_longer_than_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq, "HEARTBEAT_S", 0.02)
    beats = 0
    async with open_socket(zmq.ROUTER) as slow, ZeroMQClient(f"ipc://{tmp_path / 's'}", timeout=0.3) as client:
        slow.bind(client.address)

        async def beat() -> None:
            nonlocal beats
            while beats < 50:  # more than a second
                identity, data = await slow.recv()
                name = msgpack.unpackb(data)[1]
                if name == "heartbeat":
                    beats += 1
                    await slow.send([identity, msgpack.packb([2, "heartbeat", []])])
            await slow.send([identity, msgpack.packb([1, 1, None, {"steps": 1}])])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            assert await client.stats() == {"steps": 1}


@pytest.mark.parametrize(
    "message",
    [
        [2, "token", [1, 3, 5, "a gap"]],
        [1, 1, None, {"text": "no usage"}],
        [1, 1, None, 5],
        [1, 1, "untyped", None],
        [7],
    ],
    ids=str,
)
async def test_a_service_that_breaks_the_protocol_ends_the_call_with_an_error(tmp_path: Path, message: Any) -> None:
    async with open_socket(zmq.ROUTER) as router, ZeroMQClient(f"ipc://{tmp_path / 's'}") as client:
        router.bind(client.address)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_with, router, [message])
            with pytest.raises(MalformedMessage):
                async with client.stream("a") as stream:
                    async for _ in stream:
                        pass


async def test_it_has_the_shared_interface() -> None:
    client: Client = ZeroMQClient("ipc:///nowhere")
    assert client
