"""The bridge between ZeroMQ and trio: nothing lost, nothing twice, whatever is cancelled when."""

import random
import select
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest
import trio
import trio.testing
import zmq

from genbatch.actors.runtime.zeromq_socket import HIGH_WATER_MARK, Signed, ZeroMQSocket, open_socket

pytestmark = pytest.mark.trio

PATIENCE_S = 300.0
ROUND_TRIPS = 20_000
CLIENTS = 20


async def receive_despite_cancellations(
    socket: ZeroMQSocket, nursery: trio.Nursery, rng: random.Random
) -> tuple[list[list[bytes]], int]:
    """Receives under cancel scopes that fire after a few turns of the scheduler; counts how many did."""
    cancelled = 0

    async def fire(scope: trio.CancelScope, turns: int) -> None:
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    while True:
        with trio.CancelScope() as scope:
            if rng.random() < 0.6:
                nursery.start_soon(fire, scope, rng.randrange(4))
            messages = await socket.recv_many(8) if rng.random() < 0.5 else [await socket.recv()]
            # A cancellation that came later must not be blamed on this receive.
            return messages, cancelled
        cancelled += 1


async def test_twenty_thousand_round_trips_with_cancellations_in_mid_receive_arrive_exactly_once() -> None:
    rng = random.Random(20261121)
    cancellations = 0

    async def echo(router: ZeroMQSocket, nursery: trio.Nursery) -> None:
        nonlocal cancellations
        while True:
            messages, cancelled = await receive_despite_cancellations(router, nursery, rng)
            cancellations += cancelled
            for message in messages:
                await router.send(message)

    async def client(address: str, name: int, trips: int, nursery: trio.Nursery) -> None:
        nonlocal cancellations
        async with open_socket(zmq.DEALER) as dealer:
            dealer.connect(address)
            received: list[list[bytes]] = []
            for trip in range(trips):
                await dealer.send([b"%d/%d" % (name, trip)])
                while len(received) == trip:
                    messages, cancelled = await receive_despite_cancellations(dealer, nursery, rng)
                    received += messages
                    cancellations += cancelled
            assert received == [[b"%d/%d" % (name, trip)] for trip in range(trips)]

    async with open_socket(zmq.ROUTER) as router, trio.open_nursery() as servers:
        router.set(zmq.ROUTER_MANDATORY, 1)
        address = router.bind("tcp://127.0.0.1:*")
        servers.start_soon(echo, router, servers)
        servers.start_soon(echo, router, servers)  # two tasks wait for one socket
        async with trio.open_nursery() as clients:
            for name in range(CLIENTS):
                clients.start_soon(client, address, name, ROUND_TRIPS // CLIENTS, servers)
        servers.cancel_scope.cancel()
    assert cancellations > ROUND_TRIPS // 10


async def test_a_sender_waits_for_room_and_loses_nothing_when_cancelled() -> None:
    async with open_socket(zmq.PULL) as pull, open_socket(zmq.PUSH) as push:
        push.connect(pull.bind("tcp://127.0.0.1:*"))
        sent = 0
        payload = b"x" * 65536
        async with trio.open_nursery() as nursery:

            async def fill() -> None:
                nonlocal sent
                while True:
                    await push.send([b"%d" % sent, payload])
                    sent += 1

            nursery.start_soon(fill)
            await trio.testing.wait_all_tasks_blocked(cushion=0.2)
            nursery.cancel_scope.cancel()
        assert sent > HIGH_WATER_MARK
        while push.try_send([b"%d" % sent, payload]):  # ZeroMQ's own threads may have gone on making room
            sent += 1
        for expected in range(sent):
            assert await pull.recv() == [b"%d" % expected, payload]
        await push.send([b"room"])
        assert await pull.recv() == [b"room"]


async def test_no_more_is_taken_at_once_than_so_many_messages_or_so_many_bytes() -> None:
    class Full(ZeroMQSocket):
        def __init__(self, socket: "zmq.Socket[bytes]", sizes: list[int]) -> None:
            super().__init__(socket)
            self.sizes = sizes
            self._socket = SimpleNamespace(recv=self._next_identity)  # type: ignore[assignment]

        def _next_identity(self, _flags: int) -> bytes:
            if not self.sizes:
                raise zmq.Again
            return b"identity"

        def _recv_signed_now(self, identity: bytes) -> Signed:
            return Signed("", 9, [b"", b"x" * self.sizes.pop(0)])

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        full = Full(router, [10, 60, 50, 10, 10, 10, 200, 10])
    batches = []
    while full.sizes:
        batches.append([len(one.parts[1]) for one in full._recv_many_signed_now(3, 100)])
    assert batches == [[10, 60, 50], [10, 10, 10], [200], [10]]
    with pytest.raises(zmq.Again):
        full._recv_many_signed_now(3, 100)


async def test_messages_of_ignored_clients_are_dropped_and_counted_and_the_others_keep_their_order() -> None:
    async with open_socket(zmq.ROUTER) as router:
        address = router.bind("tcp://127.0.0.1:*")
        async with open_socket(zmq.DEALER) as gone, open_socket(zmq.DEALER) as honest:
            for dealer in (gone, honest):
                dealer.connect(address)
            await gone.send([b"first"])
            (first,) = await router.recv_many_signed(1, 1000)
            router.ignored[first.parts[0]] = None
            for _ in range(20):
                await gone.send([b"x", b"", b"yz"])
            received: list[bytes] = []
            dropped = [0, 0]
            for number in range(20):
                await honest.send([b"%d" % number])
            while len(received) < 20:
                messages = await router.recv_many_signed(64, 2**16)
                received += [message.parts[1] for message in messages]
                dropped = [before + more for before, more in zip(dropped, router.take_dropped(), strict=True)]
            assert received == [b"%d" % number for number in range(20)]
            while dropped[0] < 60:
                messages = await router.recv_many_signed(64, 2**16)
                assert not messages, "a message of an ignored client was not dropped"
                dropped = [before + more for before, more in zip(dropped, router.take_dropped(), strict=True)]
            assert dropped == [60, 60] and router.take_dropped() == (0, 0)


async def test_two_tasks_that_send_and_receive_on_one_socket_wake_each_other() -> None:
    async with open_socket(zmq.PAIR) as left, open_socket(zmq.PAIR) as right:
        right.connect(left.bind("tcp://127.0.0.1:*"))
        received: list[list[bytes]] = []

        async def collect() -> None:
            while len(received) < 2000:
                received.extend(await right.recv_many(64))

        async def answer() -> None:
            for number in range(2000):
                await left.send([b"%d" % number])

        async def chatter(socket: ZeroMQSocket, other: ZeroMQSocket) -> None:
            for number in range(2000):
                await socket.send([b"back %d" % number])
                assert await other.recv() == [b"back %d" % number]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect)
            nursery.start_soon(answer)
            nursery.start_soon(chatter, right, left)
        assert received == [[b"%d" % number] for number in range(2000)]


class Full:
    """A PAIR that takes no more, with a task that waits to send."""

    def __init__(self, socket: ZeroMQSocket) -> None:
        self.socket = socket
        self.num_sent = 0

    async def fill(self) -> None:
        while True:
            await self.socket.send([b"x" * 65536])
            self.num_sent += 1


@asynccontextmanager
async def full_pair() -> AsyncIterator[tuple[Full, ZeroMQSocket, trio.Nursery]]:
    """It, the other end, and where its task runs."""
    async with open_socket(zmq.PAIR) as left, open_socket(zmq.PAIR) as right, trio.open_nursery() as nursery:
        right.connect(left.bind("tcp://127.0.0.1:*"))
        full = Full(left)
        nursery.start_soon(full.fill)
        await trio.testing.wait_all_tasks_blocked(0.2)
        yield full, right, nursery
        nursery.cancel_scope.cancel()


def wait_unseen(socket: ZeroMQSocket) -> None:
    """Until ZeroMQ has something to tell the socket, without a turn of the event loop."""
    assert select.select([socket._fd], [], [], PATIENCE_S)[0], "nothing has come"


async def test_a_sender_that_must_wait_wakes_the_receiver_whose_message_it_was_first_to_see() -> None:
    async with full_pair() as (full, right, nursery):
        received: list[list[bytes]] = []

        async def receive() -> None:
            received.append(await full.socket.recv())

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert right.try_send([b"for the receiver"])
        wait_unseen(full.socket)
        with trio.move_on_after(0.1):
            await full.socket.send([b"one too many"])  # before the event loop looks at the descriptor
        assert received == [[b"for the receiver"]]


async def test_a_receiver_that_must_wait_wakes_the_sender_for_whom_it_was_first_to_see_room() -> None:
    async with full_pair() as (full, right, _):
        before = full.num_sent
        while right._socket.poll(200):
            right._recv_now()
        wait_unseen(full.socket)
        with trio.move_on_after(0.1):
            await full.socket.recv()
        assert full.num_sent > before


async def test_messages_that_come_together_wake_a_receiver_each() -> None:
    async with open_socket(zmq.PULL) as pull, open_socket(zmq.PUSH) as push:
        push.connect(pull.bind("tcp://127.0.0.1:*"))
        for _ in range(20):
            received: list[bytes] = []

            async def receive_one(received: list[bytes] = received) -> None:
                received += await pull.recv()

            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    for _ in range(50):
                        nursery.start_soon(receive_one)
                    await trio.testing.wait_all_tasks_blocked()
                    for number in range(50):
                        await push.send([b"%d" % number])
            assert sorted(map(int, received)) == list(range(50))


async def test_closing_wakes_everybody_who_waits() -> None:
    async with AsyncExitStack() as stack:
        socket = await stack.enter_async_context(open_socket(zmq.DEALER))
        failures = 0

        async def wait() -> None:
            nonlocal failures
            with pytest.raises(trio.ClosedResourceError):
                await socket.recv()
            failures += 1

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            socket.close()
        assert failures == 3
        with pytest.raises(trio.ClosedResourceError):
            socket.try_send([b"late"])


async def test_a_router_says_that_a_peer_is_not_there() -> None:
    async with open_socket(zmq.ROUTER) as router:
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.bind("tcp://127.0.0.1:*")
        with pytest.raises(zmq.ZMQError) as info:
            router.try_send([b"nobody", b"hello"])
        assert info.value.errno == zmq.EHOSTUNREACH
