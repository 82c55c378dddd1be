"""Clients of a soak: the steady ones, and those that cancel, stall, die and misbehave."""

import random
import socket
import subprocess
import sys
from collections import Counter

import msgpack
import trio
import zmq

from genbatch import RPCClient, ZeroMQClient
from genbatch.clients.interface import Client
from genbatch.proto.errors import GenbatchError

# Errors that a service under load, or one whose engine was killed, may answer with.
EXPECTED = {"queue_full", "unavailable", "engine_lost", "deadline_exceeded", "disconnected"}
# A call that has not ended after its deadline and so many seconds has no final.
GRACE_S = 30.0
DEADLINE_S = 60.0
PROMPTS = [f"{words} {number} " for words in ("Once upon a time", "The capital of", "A list of") for number in range(4)]

_DIES = """
import sys
from genbatch import SyncZeroMQClient
with SyncZeroMQClient(sys.argv[1]) as client, client.stream("I shall not", max_tokens=200, ignore_eos=True) as stream:
    for token in stream:
        print(token.index, flush=True)
"""


class Tally:
    """What the callers have seen."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()  # by finish reason or error code
        self.missing = 0  # calls without a final
        self.broken = 0  # streams that broke the protocol: a second final, a gap, a token after the end
        self.wrong = 0  # greedy answers that were not what the same prompt gave before
        self.unexpected: Counter[str] = Counter()
        self.answers: dict[str, list[int]] = {}

    def answer(self, prompt: str, token_ids: list[int]) -> None:
        """Books a greedy answer: the shorter is to be the beginning of the longer."""
        known = self.answers.setdefault(prompt, token_ids)
        size = min(len(known), len(token_ids))
        self.wrong += known[:size] != token_ids[:size]
        if len(token_ids) > len(known):
            self.answers[prompt] = token_ids


async def steady(client: Client, tally: Tally, rng: random.Random) -> None:
    """Asks one thing after another, streamed or whole, and now and then leaves in the middle."""
    while True:
        prompt, most = rng.choice(PROMPTS), rng.randint(1, 48)
        leaves_s = rng.random() * 2 if rng.random() < 0.2 else float("inf")
        ended = False
        with trio.move_on_after(DEADLINE_S + GRACE_S), trio.move_on_after(leaves_s) as leaving:
            ended = await _ask(client, tally, prompt, most, stream=rng.random() < 0.7)
        if leaving.cancelled_caught:
            tally.ends["left"] += 1
        elif not ended:
            tally.missing += 1


async def _ask(client: Client, tally: Tally, prompt: str, most: int, *, stream: bool) -> bool:
    try:
        if stream:
            async with client.stream(prompt, max_tokens=most, deadline_s=DEADLINE_S) as tokens:
                seen = [token.token_id async for token in tokens]
            result = tokens.result
            tally.broken += seen != result.token_ids
        else:
            result = await client.generate(prompt, max_tokens=most, deadline_s=DEADLINE_S)
        tally.ends[result.finish_reason] += 1
        tally.answer(prompt, result.token_ids)
    except GenbatchError as error:
        tally.ends[error.code] += 1
        tally.broken += error.code == "malformed_message"
        if error.code not in EXPECTED:
            tally.unexpected[repr(error)[:200]] += 1
        await trio.sleep(0.2)
    return True


async def staller(address: str, tally: Tally) -> None:
    """Streams with credit for one token, grants no more, and waits for the service to have enough of it."""
    path = address.removeprefix("unix://")
    while True:
        stream = await trio.open_unix_socket(path)
        params = {"prompt": "I do not read", "max_tokens": 64, "ignore_eos": True}
        await stream.send_all(msgpack.packb([0, 1, "stream", [params, {"credit": 1}]]))
        unpacker = msgpack.Unpacker()
        final = None
        with trio.move_on_after(DEADLINE_S + GRACE_S):
            while final is None:
                data = await stream.receive_some()
                if not data:
                    break
                unpacker.feed(data)
                final = next((message for message in unpacker if message[0] == 1), None)
        await stream.aclose()
        if final is None:
            tally.missing += 1
        else:
            code = final[2]["code"] if final[2] else "not noticed"
            tally.ends[f"stalled: {code}"] += 1
            if code not in {*EXPECTED, "cancelled"}:
                tally.unexpected[f"a stalled stream ended with {code}"] += 1
        await trio.sleep(1)


async def kill(process: trio.Process) -> None:
    """Without a word, as a machine's end is."""
    process.kill()


async def dier(address: str, tally: Tally, rng: random.Random) -> None:
    """A process that streams and is killed."""
    while True:
        command = [sys.executable, "-c", _DIES, address]
        with trio.move_on_after(1 + rng.random() * 3):  # which kills it
            await trio.run_process(
                command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, deliver_cancel=kill
            )
        tally.ends["killed"] += 1
        await trio.sleep(2)


async def rude(zeromq: str, rpc: str, tally: Tally, rng: random.Random) -> None:
    """Bytes that mean nothing, or nothing good, in either framing."""
    context = zmq.Context.instance()
    while True:
        data = rng.choice(
            (
                rng.randbytes(rng.randint(1, 400)),
                msgpack.packb([0, 1, "generate", [{"prompt": "x", "max_tokens": -1}]]),
                msgpack.packb([0, 1, "no such method", [{}]]),
                msgpack.packb([0, 1, "generate", [{"prompt": ["x"] * 50}]]),
                b"\x91" * 3000,
                b"\xdd\xff\xff\xff\xff",
            )
        )
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(zeromq)
        dealer.send_multipart([data] * rng.randint(1, 3))
        await trio.sleep(0.2)
        dealer.close()
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(rpc.removeprefix("unix://"))
            raw.sendall(data)
            await trio.sleep(0.2)
        tally.ends["rude"] += 1


async def run_callers(zeromq: str, rpc: str, tally: Tally, *, steady_callers: int, seed: int) -> None:
    """All of them, until cancelled."""
    rng = random.Random(seed)
    async with ZeroMQClient(zeromq) as over_zeromq, RPCClient(rpc) as over_rpc, trio.open_nursery() as nursery:
        for number in range(steady_callers):
            client = (over_zeromq, over_rpc)[number % 2]
            nursery.start_soon(steady, client, tally, random.Random(rng.random()))
        nursery.start_soon(staller, rpc, tally)
        nursery.start_soon(dier, zeromq, tally, random.Random(rng.random()))
        nursery.start_soon(rude, zeromq, rpc, tally, random.Random(rng.random()))
