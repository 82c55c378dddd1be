"""To which account a connection's requests go: connections, doors and names cost a client nothing."""

import os
import socket
from pathlib import Path

import msgpack
import pytest
import trio
import zmq

from genbatch.actors.fleet.fairness import account_in_fleet
from genbatch.actors.gateways.accepting import GONE, account_of_descriptor, account_of_host, account_of_socket
from genbatch.actors.gateways.addresses import parse_http_address
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.http.http_gateway import HTTPGateway
from genbatch.actors.gateways.rpc_gateway import RPCGateway
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.zeromq_socket import open_socket
from genbatch.actors.scheduling.request import charged_account
from tests.actors.gateways.scripted_batcher import ScriptedBatcher
from tests.waiting import received_until

OWN = f"process:{os.getpid()}"


@pytest.mark.parametrize(
    ("host", "account"),
    [
        ("10.0.0.7", "host:10.0.0.7"),
        ("127.0.0.1", "host:localhost"),
        ("127.9.8.7", "host:localhost"),  # a program may connect from all of 127.0.0.0/8
        ("::1", "host:localhost"),
        ("::ffff:10.0.0.7", "host:10.0.0.7"),
        ("2001:db8:1:2:3::4", "host:2001:db8:1:2::/64"),
        ("fe80::1%eth0", "host:fe80::/64"),
        ("testclient", "host:testclient"),
    ],
)
def test_a_machine_is_one_account_however_many_addresses_it_has(host: str, account: str) -> None:
    assert account_of_host(host) == account


def test_a_process_is_one_account_over_unix_sockets() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert account_of_socket(ours) == account_of_descriptor(theirs.fileno()) == OWN
        closed = theirs.fileno()
    assert account_of_descriptor(closed) == account_of_socket(ours) == GONE


def test_a_tenant_that_is_merely_named_has_no_account_and_that_of_a_token_is_one_at_every_gateway() -> None:
    assert charged_account("host:10.0.0.7", "alice") == "host:10.0.0.7"
    assert charged_account("", "alice", embeds=True) == "tenant:alice (embeddings)"
    names = ("tenant:alice", "host:10.0.0.7", "host:localhost", "process:7")
    told = [account_in_fleet("g1", name) for name in names]
    assert told == ["tenant:alice", "host:10.0.0.7", "g1/host:localhost", "g1/process:7"]


async def over_rpc(address: str) -> None:
    transport, _, place = address.partition("://")
    if transport == "unix":
        stream = await trio.open_unix_socket(place)
    else:
        stream = await trio.open_tcp_stream("127.0.0.1", int(place.rpartition(":")[2]))
    async with stream:
        hello, generate = [0, 1, "hello", []], [0, 2, "generate", [{"prompt": "a", "tenant": str(id(stream))}]]
        await stream.send_all(msgpack.packb(hello) + msgpack.packb(generate))
        unpacker = msgpack.Unpacker()
        while not any(message[:2] == [1, 2] for message in unpacker):
            unpacker.feed(await stream.receive_some())


async def over_zeromq(address: str) -> None:
    async with open_socket(zmq.DEALER) as dealer:
        dealer.connect(address)
        await dealer.send([msgpack.packb([0, 1, "generate", [{"prompt": "a"}]])])
        await dealer.recv()


async def over_http(address: str) -> None:
    body = b'{"prompt": "a"}'
    async with await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2])) as stream:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        await stream.send_all(head.encode() + body)
        assert (await received_until(stream, b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.trio
async def test_the_connections_of_a_program_and_the_doors_of_a_machine_share_an_account(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    batcher = ScriptedBatcher()
    dispatcher = Dispatcher(await start(nursery, batcher))
    unix, ipc = f"unix://{tmp_path}/rpc.sock", f"ipc://{tmp_path}/zeromq.sock"
    doors = [
        *((over_rpc, RPCGateway(dispatcher, address)) for address in (unix, "tcp://127.0.0.1:0")),
        *((over_zeromq, ZeroMQGateway(dispatcher, address)) for address in (ipc, "tcp://127.0.0.1:*")),
        (over_http, HTTPGateway(dispatcher, parse_http_address(":0"))),
    ]
    for ask, gateway in doors:
        address = await nursery.start(gateway.run)
        for _ in range(3):
            await ask(address)
    accounts = [message.client for message in batcher.requests]
    there = "host:localhost"
    assert accounts == [OWN] * 3 + [there] * 3 + [OWN] * 3 + [there] * 6
    nursery.cancel_scope.cancel()
