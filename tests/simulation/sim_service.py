"""SimService: one engine that does not die, behind real gateway sessions, in simulated time.

For tests that stage a fault instead of drawing one:

async def story(service: SimService) -> None:
    caller = service.connect("a")
    call = await caller.ask(GenerateRequest(token_ids=[11, 12]))
    await call.ended.wait()

run_simulated(story, model, BatcherOptions())
"""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.gateways.accepting import MAX_HALF_MESSAGES, MessageBudget, Peer
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.rpc_gateway import SWEEP_S, RPCConnection, check_connection
from genbatch.actors.gateways.session import CallHost
from genbatch.actors.runtime.actor import start
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.proto.codec import MAX_TRANSPORT_BYTES, MessageSplitter
from genbatch.proto.messages import GenerateRequest
from genbatch.proto.rpc import PLAIN_STREAM, CallAnswered, CallFailed, ClientConnection, StreamOptions, TokenReceived
from tests.simulation.history_runner import HistoryRunner
from tests.simulation.pipe import End, pair
from tests.simulation.seeded_loop import run_seeded
from tests.simulation.sim_worker import SimWorker

# Most that a step takes, and a piece of a message on its way.
STEP_S, DELAY_S = 0.25, 0.01
# Simulated seconds after which a story that has not come to its end never will.
LIVENESS_S = 3600.0


@dataclass(eq=False)
class SimCall:
    """A call and what came of it."""

    request: GenerateRequest
    asked_at: float
    token_times: list[float] = field(default_factory=list)
    end: Any = None  # the result's plain data, or the error
    finals: int = 0
    ended_at: float = 0.0
    ended: trio.Event = field(default_factory=trio.Event)


class SimCaller:
    """A client's end of one connection."""

    def __init__(self, end: End) -> None:
        self.end = end
        self.protocol = ClientConnection()
        self.calls: dict[int, SimCall] = {}
        self.sending = trio.Lock()

    async def ask(self, request: GenerateRequest, options: StreamOptions = PLAIN_STREAM) -> SimCall:
        """Sends a stream's request."""
        msgid, data = self.protocol.request("stream", request, options)
        call = self.calls[msgid] = SimCall(request, trio.current_time())
        await self.send(data)
        return call

    async def send(self, data: bytes) -> None:
        async with self.sending:
            await self.end.send_all(data)

    async def read(self) -> None:
        """Takes what comes, until the end."""
        splitter = MessageSplitter(MAX_TRANSPORT_BYTES)
        while data := await self.end.receive_some():
            for message in splitter.feed(data):
                self._take(self.protocol.receive(message))

    def _take(self, event: object) -> None:
        match event:
            case TokenReceived(msgid, _):
                assert not self.calls[msgid].finals, "a token after the final"
                self.calls[msgid].token_times.append(trio.current_time())
            case CallAnswered(int(msgid), end) | CallFailed(int(msgid), end):
                call = self.calls[msgid]
                call.finals += 1
                assert call.finals == 1, "two finals"
                call.end, call.ended_at = end, trio.current_time()
                call.ended.set()


class SimService:
    """Made by `run_simulated`.

    Args:
        nursery: where all of it runs.
        model: for the tokenizer and the limits; it is never evaluated.
        options: the Batcher's.
        num_blocks: of four positions each.
    """

    def __init__(self, nursery: trio.Nursery, model: Model, options: BatcherOptions, num_blocks: int) -> None:
        self.nursery = nursery
        self._rng = random.Random(0)
        self.batcher = Batcher(
            lambda: Context(
                model,
                HistoryRunner(),
                num_blocks=[num_blocks],
                n_parallel=options.n_parallel,
                n_held=options.max_held_prompts,
                n_batch=options.max_batch_tokens,
                block_size=4,
            ),
            options,
            open_worker=lambda _: SimWorker(nursery, random.Random(self._rng.random()), STEP_S),
        )

    async def start(self) -> None:
        self.ref = await start(self.nursery, self.batcher, name="batcher")
        self._dispatcher = Dispatcher(self.ref)
        self._budget = MessageBudget(MAX_HALF_MESSAGES)

    def connect(self, name: str) -> SimCaller:
        """A new connection to the gateway."""
        there, here = pair(random.Random(self._rng.random()), window=2**16, max_delay_s=DELAY_S)
        self.nursery.start_soon(self._serve, here, name)
        caller = SimCaller(there)
        self.nursery.start_soon(caller.read)
        return caller

    async def come_to_rest(self) -> None:
        """Waits until nothing is at work; then nothing may be held."""
        batcher = self.batcher
        while len(batcher.requests):  # noqa: ASYNC110 - time is simulated, and there is no one event to wait for
            await trio.sleep(STEP_S)
        await trio.sleep(1.0)
        assert batcher.slots.seq_pool == set(range(batcher.options.n_parallel)), "a slot is lost"
        assert not batcher.slots.sequences and not batcher.slots.pending
        batcher.ctx.kv.check_integrity()
        for held in list(batcher.held_prompts):
            batcher.slots.drop_held(held)
        assert batcher.ctx.kv.counts().used == 0, "blocks are lost"

    async def _serve(self, end: End, name: str) -> None:
        async with trio.open_nursery() as calls:
            connection = RPCConnection(
                end, self._dispatcher, CallHost(calls), peer=Peer(name, name), budget=self._budget
            )
            calls.start_soon(self._sweep, connection)
            await connection.run()
            calls.cancel_scope.cancel()

    async def _sweep(self, connection: RPCConnection) -> None:
        while True:
            await trio.sleep(SWEEP_S)
            check_connection(connection, trio.current_time())


def run_simulated(
    story: Callable[[SimService], Awaitable[None]], model: Model, options: BatcherOptions, *, num_blocks: int = 200
) -> None:
    """Runs it in simulated time, the same way each time; afterwards the service must have given everything back."""

    async def main() -> None:
        with trio.fail_after(LIVENESS_S):
            await live()

    async def live() -> None:
        async with trio.open_nursery() as nursery:
            service = SimService(nursery, model, options, num_blocks)
            await service.start()
            await story(service)
            await service.come_to_rest()
            nursery.cancel_scope.cancel()

    run_seeded(main, 0)
