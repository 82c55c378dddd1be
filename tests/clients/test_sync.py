"""The clients without an event loop, over each transport, against a gateway on another thread."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import pytest
import trio
import zmq

from genbatch.clients import sync
from genbatch.clients.interface import ClientClosed, ClientError, StreamNotEnded, SyncClient
from genbatch.clients.remote import Retry
from genbatch.clients.sync import WINDOW, SyncRemoteClient, SyncRPCClient, SyncRPCTransport, SyncZeroMQClient
from genbatch.proto.errors import EngineError, InvalidRequest, QueueFull, Unavailable
from genbatch.proto.service_messages import Drained, Health
from tests.actors.gateways.scripted_batcher import CARD, PATIENCE_S, Served, served

T = TypeVar("T")


class Background:
    """A service on another thread, whose scripted Batcher is told what to do from this one."""

    def __init__(self, service: Served, token: trio.lowlevel.TrioToken, stop: trio.Event) -> None:
        self.address = service.address
        self.service = service
        self._token = token
        self._stop = stop

    def emit(self, prompt: str, *words: str, finish: bool = False) -> None:
        """Lets tokens of a held request come, once it has arrived."""

        async def act() -> None:
            held = await self.service.batcher.arrival(prompt)
            for word in words:
                held.emit(word)
            if finish:
                held.finish()

        trio.from_thread.run(act, trio_token=self._token)

    def wait_for_release(self, prompt: str) -> None:
        trio.from_thread.run(self.service.batcher.release, prompt, trio_token=self._token)

    def stop_gateway(self) -> None:
        """Returns once it has ended, and its connections with it."""

        async def act() -> None:
            self.service.gateway_scope.cancel()
            await self.service.gateway_ended.wait()

        trio.from_thread.run(act, trio_token=self._token)

    def stop(self) -> None:
        trio.from_thread.run_sync(self._stop.set, trio_token=self._token)


@contextmanager
def in_background(directory: Path, transport: str) -> Iterator[Background]:
    started = Event()
    made: list[Background] = []

    async def main() -> None:
        async with served(directory, transport) as service:
            stop = trio.Event()
            made.append(Background(service, trio.lowlevel.current_trio_token(), stop))
            started.set()
            await stop.wait()

    thread = Thread(target=trio.run, args=(main,))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield made[0]
    finally:
        made[0].stop()
        thread.join()


@pytest.fixture(params=["ipc", "unix"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def client_at(address: str, **options: Any) -> SyncRemoteClient:
    """The client that speaks what the address says."""
    if address.startswith("ipc://"):
        return SyncZeroMQClient(address, **options)
    return SyncRPCClient(address, **options)


@pytest.fixture
def background(tmp_path: Path, transport: str) -> Iterator[Background]:
    with in_background(tmp_path, transport) as service:
        yield service


def test_generate_and_stats_return_what_the_service_answers(background: Background) -> None:
    with client_at(background.address) as client:
        assert client.generate("a b", max_tokens=4).text == "ab"
        assert client.stats()["steps"] == 7


def test_a_second_thread_is_refused_and_the_first_gets_its_answer(background: Background) -> None:
    texts: list[str] = []
    with client_at(background.address) as client:
        thread = Thread(target=lambda: texts.append(client.generate("hold").text))
        thread.start()
        background.emit("hold", "a")  # returns once the request of the thread has arrived
        with pytest.raises(ClientError, match="another thread"):
            client.generate("x")
        with pytest.raises(ClientError, match="another thread"), client.stream("x"):
            pass
        background.emit("hold", finish=True)
        thread.join()
        assert client.generate("b").text == "b"
    assert texts == ["a"]


FORKED = """
import os, sys
from genbatch.clients.interface import ClientClosed
from genbatch import SyncRPCClient, SyncZeroMQClient

address = sys.argv[1]
with (SyncZeroMQClient if address.startswith("ipc") else SyncRPCClient)(address) as client:
    print(client.generate("a b").text)
    child = os.fork()
    if child == 0:
        try:
            client.generate("c d")
        except ClientClosed:
            sys.exit(3)
    print(client.generate("c d").text)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(client.generate("e f").text)
"""


def test_a_fork_of_the_process_is_refused_and_its_parent_goes_on(background: Background) -> None:
    command = [sys.executable, "-c", FORKED, background.address]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # a fork would write a filled buffer again
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=environment)
    assert (ended.stdout.split(), ended.stderr) == (["ab", "cd", "3", "ef"], "")


def test_a_stream_yields_tokens_then_has_the_result(background: Background) -> None:
    with client_at(background.address) as client:
        with client.stream("hold") as stream:
            background.emit("hold", "a")
            assert next(iter(stream)).text == "a"
            with pytest.raises(StreamNotEnded):
                _ = stream.result
            background.emit("hold", "b", "c", finish=True)
            assert [token.text for token in stream] == ["b", "c"]
        assert stream.result.text == "abc"


def test_two_streams_of_one_client_are_read_in_turns(background: Background) -> None:
    with client_at(background.address) as client:
        streams = client.stream("hold 1"), client.stream("hold 2")
        with streams[0] as first, streams[1] as second:
            background.emit("hold 1", "a", "b", finish=True)
            background.emit("hold 2", "x", "y", finish=True)
            assert [(one.text, two.text) for one, two in zip(first, second, strict=True)] == [("a", "x"), ("b", "y")]


def test_leaving_a_stream_early_frees_the_request(background: Background) -> None:
    with client_at(background.address) as client:
        with client.stream("hold") as stream:
            background.emit("hold", "a")
            next(iter(stream))
        background.wait_for_release("hold")
        assert client.generate("next").text == "next"


def test_a_program_that_is_busy_between_two_tokens_misses_none(background: Background) -> None:
    with client_at(background.address) as client, client.stream("hold") as stream:
        words = [f"word {n} " for n in range(3 * WINDOW)]  # more than the service may be ahead
        for start in range(0, len(words), 200):
            background.emit("hold", *words[start : start + 200])
        background.emit("hold", finish=True)
        assert [token.text for token in stream] == words


def test_a_refused_request_is_sent_again_when_the_service_said(background: Background) -> None:
    with client_at(background.address) as client:
        assert client.generate("busy 2 a b").text == "ab"
        with client.stream("busy 1 a b") as stream:
            assert [token.text for token in stream] == ["a", "b"]
        assert stream.result.text == "ab"
        client.retry = Retry(max_attempts=1)
        with pytest.raises(QueueFull):
            client.generate("busy 1 x")


def test_what_is_not_a_generation_is_one_call(background: Background) -> None:
    with client_at(background.address) as client:
        assert client.tokenize("AB") == [1, 65, 66]
        assert client.tokenize("AB", add_special_tokens=False) == [0, 65, 66]
        assert client.detokenize([72, 105]) == "Hi"
        assert client.models() == (CARD,)
        assert client.health() == Health(status="ready", steps=7, requests_running=1, requests_waiting=2, stalled_s=0.5)
        assert client.drain(3) == Drained(num_cancelled=3)


def test_errors_arrive_as_the_classes_they_are(background: Background) -> None:
    with client_at(background.address) as client:
        with pytest.raises(EngineError, match="the step failed"):
            client.generate("fault")
        with pytest.raises(InvalidRequest) as info:
            client.generate("a", top_p=2.0)
        assert info.value.field == "top_p"
        with pytest.raises(InvalidRequest) as info:
            client.generate("a", messages="hello")  # type: ignore[arg-type]
        assert info.value.field == "messages"


def test_a_service_that_stops_ends_the_call(background: Background) -> None:
    with client_at(background.address) as client, client.stream("hold") as stream:
        background.emit("hold", "a")
        assert next(iter(stream)).text == "a"
        background.stop_gateway()
        with pytest.raises(Unavailable):
            next(iter(stream))


def test_a_service_that_was_restarted_between_two_requests_is_found_again(tmp_path: Path, transport: str) -> None:
    with in_background(tmp_path, transport) as first, client_at(first.address) as client:
        assert client.generate("before").text == "before"
        first.stop_gateway()
        if transport == "ipc":
            assert client._transport._monitor.poll(round(1000 * PATIENCE_S))  # type: ignore[attr-defined]
        with in_background(tmp_path, transport):
            assert client.generate("after").text == "after"


def test_nobody_at_the_address_is_unavailable_after_the_timeout(tmp_path: Path, transport: str) -> None:
    nobody = client_at(f"{transport}://{tmp_path / 'nobody'}", timeout=0.1)
    with nobody as client, pytest.raises(Unavailable, match="no service answers"):
        client.generate("a")


@pytest.mark.parametrize("client", [SyncZeroMQClient, SyncRPCClient])
def test_an_address_that_is_none_is_unavailable_at_once(client: type[SyncZeroMQClient | SyncRPCClient]) -> None:
    with pytest.raises(Unavailable, match="not an address"), client("nonsense"):
        pass


def test_a_silent_service_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "HEARTBEAT_S", 0.02)
    address = f"ipc://{tmp_path / 'socket'}"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.linger = 0
        silent.bind(address)
        with SyncZeroMQClient(address, timeout=0.2) as client:
            client._transport.connect(PATIENCE_S)
            with pytest.raises(Unavailable, match="silent"):
                client.generate("a")


def test_a_closed_client_says_so(background: Background) -> None:
    with client_at(background.address) as client:
        pass
    with pytest.raises(ClientClosed):
        client.stats()


def test_it_has_the_shared_interface() -> None:
    clients: list[SyncClient] = [SyncZeroMQClient("ipc:///nowhere"), SyncRPCClient("unix:///nowhere")]
    assert clients


def test_a_service_hears_of_the_client_once_in_a_while_and_no_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    client = SyncZeroMQClient("ipc:///nowhere")
    monkeypatch.setattr(client._transport, "send", sent.append)
    counts = []
    for now in (1000.0, 1000.0 + sync.HEARTBEAT_S / 2, 1000.0 + sync.HEARTBEAT_S, 1000.0 + 1.5 * sync.HEARTBEAT_S):
        monkeypatch.setattr(sync.time, "monotonic", lambda now=now: now)
        client._beat()
        counts.append(len(sent))
    assert counts == [1, 1, 2, 2]


def test_who_waits_is_heard_of_and_waits_no_longer_than_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = 1000.0, []
    client = SyncZeroMQClient("ipc:///nowhere", timeout=5 * sync.HEARTBEAT_S)
    client._opener = os.getpid()

    def nothing(timeout: float) -> list[bytes]:
        nonlocal now
        now += timeout
        return []

    monkeypatch.setattr(sync.time, "monotonic", lambda: now)
    monkeypatch.setattr(client._transport, "send", sent.append)
    monkeypatch.setattr(client._transport, "receive", nothing)
    failed: list[Exception] = []
    monkeypatch.setattr(client, "_fail_all", failed.append)
    client.wait_for(lambda: bool(failed))
    assert isinstance(failed[0], Unavailable) and "silent" in str(failed[0])
    assert len(sent) == 6 and now == 1000.0 + 6 * sync.HEARTBEAT_S


def test_no_try_to_connect_has_more_than_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def refuse(transport: SyncRPCTransport, timeout: float) -> socket.socket:
        given.append(timeout)
        raise ConnectionRefusedError

    monkeypatch.setattr(SyncRPCTransport, "_connect", refuse)
    with SyncRPCClient("rpc://127.0.0.1:1", timeout=0.2) as client, pytest.raises(Unavailable, match="no service"):
        client.health()
    assert len(given) > 1 and 0 < given[-1] < given[0] <= 0.2
