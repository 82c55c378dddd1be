"""The trio clients, over each transport, against a real gateway with a scripted Batcher behind it."""

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import zmq

from genbatch.clients import remote
from genbatch.clients.interface import Client, ClientClosed, StreamNotEnded
from genbatch.clients.remote import RemoteClient, Retry, RPCClient, ZeroMQClient
from genbatch.proto.codec import REQUEST_LIMITS
from genbatch.proto.errors import EngineError, FrameTooLarge, InvalidRequest, QueueFull, Unavailable
from genbatch.proto.messages import Message, Result, Token, Usage
from genbatch.proto.service_messages import Drained, Health
from tests.actors.gateways.scripted_batcher import CARD, served

pytestmark = [pytest.mark.trio, pytest.mark.parametrize("transport", ["ipc", "unix"])]


def client_at(address: str, **options: Any) -> RemoteClient:
    """The client that speaks what the address says."""
    return ZeroMQClient(address, **options) if address.startswith("ipc://") else RPCClient(address, **options)


@pytest.fixture(autouse=True)
def no_lease_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is freed here is freed because the client said so."""
    monkeypatch.setattr(remote, "LEASE_S", 60.0)


async def test_generate_returns_the_result(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
        assert await client.generate("a b", max_tokens=9, temperature=0.5, stop="END") == Result(
            text="ab",
            token_ids=[100, 101],
            finish_reason="stop",
            usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
        )
        wanted = service.batcher.requests[0].request
        assert (wanted.max_tokens, wanted.temperature, wanted.stop) == (9, 0.5, ["END"])
        assert (await client.stats())["steps"] == 7


async def test_a_prompt_may_be_text_token_ids_or_messages(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
        await client.generate([3, 4])
        await client.generate(messages=[{"role": "user", "content": "a"}, Message(role="assistant", content="b")])
        first, second = (generate.request for generate in service.batcher.requests)
        assert first.token_ids == [3, 4]
        assert second.messages == [Message(role="user", content="a"), Message(role="assistant", content="b")]


async def test_a_stream_yields_each_token_when_it_comes_then_has_the_result(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
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


async def test_two_requests_of_one_client_run_at_once(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
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


async def test_cancelling_the_scope_frees_the_request(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.generate, "hold")
            await service.batcher.arrival("hold")
            nursery.cancel_scope.cancel()
        await service.batcher.release("hold")
        assert (await client.generate("next")).text == "next"


async def test_leaving_a_stream_early_frees_the_request(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
        async with client.stream("hold") as stream:
            (await service.batcher.arrival("hold")).emit("a")
            async for token in stream:
                assert token.text == "a"
                break
        await service.batcher.release("hold")


async def test_closing_the_client_frees_its_requests_and_ends_its_calls(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service:
        failures: list[str] = []

        async def ask(client: RemoteClient) -> None:
            with pytest.raises(Unavailable) as info:
                await client.generate("hold")
            failures.append(info.value.message)

        async with trio.open_nursery() as nursery:
            async with client_at(service.address) as client:
                nursery.start_soon(ask, client)
                await service.batcher.arrival("hold")
            await service.batcher.release("hold")
        assert failures == ["the client was closed"]
        with pytest.raises(ClientClosed):
            await client.generate("a")


async def test_errors_arrive_as_the_classes_they_are(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
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


async def test_wrong_types_and_too_much_are_refused_before_anything_is_sent(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
        with pytest.raises(InvalidRequest) as info:
            await client.generate("a", max_tokens="8")  # type: ignore[arg-type]
        assert info.value.field == "max_tokens"
        with pytest.raises(InvalidRequest) as info:
            await client.generate("a", max_token=8)  # type: ignore[call-arg]
        assert info.value.field == "max_token"
        with pytest.raises(FrameTooLarge):
            await client.generate("x" * REQUEST_LIMITS.max_bytes)
        assert service.batcher.requests == []


async def test_what_the_body_raises_comes_out_as_it_is(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service:
        with pytest.raises(ZeroDivisionError):
            async with client_at(service.address) as client, client.stream("hold"):
                raise ZeroDivisionError
        with pytest.raises(EngineError):
            async with client_at(service.address) as client:
                await client.generate("fault")


async def test_nobody_at_the_address_is_unavailable_after_the_timeout(tmp_path: Path, transport: str) -> None:
    address = f"{transport}://{tmp_path / 'nobody'}"
    async with client_at(address, timeout=0.1) as client:
        with pytest.raises(Unavailable, match="no service answers"):
            await client.generate("a")
        with pytest.raises(Unavailable, match="no service answers"):
            await client.stats()


async def test_a_service_that_comes_late_is_waited_for(tmp_path: Path, transport: str) -> None:
    async with client_at(f"{transport}://{tmp_path / 'socket'}") as client, trio.open_nursery() as nursery:
        results: list[Result] = []

        async def ask() -> None:
            results.append(await client.generate("a b"))

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        async with served(tmp_path, transport):
            while not results:
                await trio.testing.wait_all_tasks_blocked(0.01)


async def test_a_service_that_stops_ends_open_calls(tmp_path: Path, transport: str) -> None:
    async with (
        served(tmp_path, transport) as service,
        client_at(service.address) as client,
        client.stream("hold") as stream,
    ):
        await service.batcher.arrival("hold")
        service.gateway_scope.cancel()
        with pytest.raises(Unavailable):
            async for _ in stream:
                pass


async def test_a_service_that_was_restarted_between_two_requests_is_found_again(tmp_path: Path, transport: str) -> None:
    async with client_at(f"{transport}://{tmp_path / 'socket'}") as client:
        for prompt in ("before", "after"):
            async with served(tmp_path, transport) as service:
                assert (await client.generate(prompt)).text == prompt
                assert [generate.request.prompt for generate in service.batcher.requests] == [prompt]
            await until_lost(client)  # what is sent before it knows ends with the connection


async def until_lost(client: RemoteClient) -> None:
    """Waits until the client has noticed that its service is gone."""
    transport: Any = client._transport
    if isinstance(client, ZeroMQClient):
        while transport._current.socket._events() & zmq.POLLOUT:
            await trio.testing.wait_all_tasks_blocked(0.001)
    else:
        while transport._connection is not None:
            await trio.testing.wait_all_tasks_blocked(0.001)
    await trio.testing.wait_all_tasks_blocked()


async def test_a_request_given_up_before_there_was_a_service_never_reaches_one(tmp_path: Path, transport: str) -> None:
    async with client_at(f"{transport}://{tmp_path / 'socket'}", timeout=0.05) as client:
        for _ in range(5):
            with pytest.raises(Unavailable):
                await client.generate("stale")
        async with served(tmp_path, transport) as service:
            client.timeout = 10.0
            await client.generate("fresh")
            assert [generate.request.prompt for generate in service.batcher.requests] == ["fresh"]


async def test_a_refused_request_is_sent_again_when_the_service_said(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
        assert (await client.generate("busy 2 a b")).text == "ab"
        async with client.stream("busy 2 a b") as stream:
            assert [token.text async for token in stream] == ["a", "b"]
        assert stream.result.text == "ab"
        assert len(service.batcher.requests) == 6


async def test_tries_end_and_one_is_enough_if_so_wanted(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service:
        for attempts in (1, 3):
            async with client_at(service.address, retry=Retry(max_attempts=attempts)) as client:
                service.batcher.requests.clear()
                with pytest.raises(QueueFull):
                    await client.generate("busy 9 a")
                with pytest.raises(QueueFull):
                    async with client.stream("busy 9 a") as stream:
                        async for _ in stream:
                            pass
                assert len(service.batcher.requests) == 2 * attempts


async def test_a_request_of_which_a_token_has_come_is_never_sent_again(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
        async with client.stream("hold") as stream:
            held = await service.batcher.arrival("hold")
            held.emit("a")
            held.fail(QueueFull("late", retry_after_ms=1))
            with pytest.raises(QueueFull):
                async for _ in stream:
                    pass
        assert len(service.batcher.requests) == 1


async def test_a_refusal_without_a_time_is_final(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
        with pytest.raises(EngineError):
            await client.generate("fault")  # it has a time, but what became of it is not known
        assert len(service.batcher.requests) == 1


async def test_a_slow_reader_gets_every_token_and_the_service_is_not_ahead_by_more_than_the_window(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WINDOW", 8)
    async with (
        served(tmp_path, transport) as service,
        client_at(service.address) as client,
        client.stream("hold") as stream,
        client.stream("hold too") as other,
    ):
        held = await service.batcher.arrival("hold")
        words = [str(n) for n in range(100)]
        for word in words:
            held.emit(word)
        held.finish()
        (await service.batcher.arrival("hold too")).emit("quick")
        assert (await anext(aiter(other))).text == "quick"  # the slow one waits alone
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(stream.tokens) == 8
        assert [token.text async for token in stream] == words


async def test_how_long_a_caller_waits_travels_as_the_deadline(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
        with trio.fail_after(200):
            await client.generate("a")
            await client.generate("b", deadline_s=50.0)
            await client.generate("c", deadline_s=500.0)
        deadlines = [generate.request.deadline_s for generate in service.batcher.requests]
        assert all(deadline is not None for deadline in deadlines)
        assert 0 < (deadlines[0] or 0) <= 200
        assert 0 < (deadlines[1] or 0) <= 50
        assert 0 < (deadlines[2] or 0) <= 200
        with pytest.raises(InvalidRequest) as info:
            await client.generate("a", deadline_s=-1.0)
        assert info.value.field == "deadline_s"


async def test_what_is_not_a_generation_is_one_call(tmp_path: Path, transport: str) -> None:
    async with served(tmp_path, transport) as service, client_at(service.address) as client:
        assert await client.tokenize("AB") == [1, 65, 66]
        assert await client.tokenize("AB", add_special_tokens=False) == [0, 65, 66]
        assert await client.detokenize([72, 105]) == "Hi"
        assert await client.models() == (CARD,)
        assert await client.health() == Health(
            status="ready", steps=7, requests_running=1, requests_waiting=2, stalled_s=0.5
        )
        assert await client.drain(3) == Drained(num_cancelled=3)
        with pytest.raises(InvalidRequest) as info:
            await client.drain(-1)
        assert info.value.field == "timeout_s"
        with pytest.raises(InvalidRequest):
            await client.tokenize("a", messages="b")  # type: ignore[arg-type]
