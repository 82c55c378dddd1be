"""SimClient: a caller drawn by seed, over the real wire protocol, that checks every message it gets."""

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from genbatch.proto.errors import GenbatchError
from genbatch.proto.framing import MessageSplitter
from genbatch.proto.limits import MAX_TRANSPORT_BYTES
from genbatch.proto.messages import GenerateRequest, Result
from genbatch.proto.rpc import PLAIN_STREAM, Answered, Failed, StreamOptions, TokenReceived, TokensReceived
from genbatch.proto.rpc_client import ClientConnection
from tests.simulation.history_runner import DIE, FIRST_PLAIN, NAN, RAISE, VOCAB, expected
from tests.simulation.pipe import End

if TYPE_CHECKING:
    from tests.simulation.world import World

# What a request may fail with when nothing but load, its own content or an engine's death is to blame.
REFUSALS = {"queue_full", "unavailable", "deadline_exceeded"}


@dataclass
class Call:
    """One request and what came of it."""

    request: GenerateRequest
    stream: bool
    harm: int | None  # the token in its prompt that does harm
    asked_at: float
    tokens: list[int] = field(default_factory=list)
    end: Any = None  # Result or error
    finals: int = 0
    ended: trio.Event = field(default_factory=trio.Event)
    cancelled: bool = False


class SimClient:
    """One connection after another to the gateway.

    Args:
        world: where it lives.
        name: for the trace.
        rng: draws all it does.
    """

    def __init__(self, world: "World", name: str, rng: random.Random) -> None:
        self.world = world
        self.name = name
        self.rng = rng
        self._calls: dict[int, Call] = {}
        self._protocol = ClientConnection()
        self._end: End
        self._sending = trio.Lock()
        self._has_vanished = False  # by its own will: what it was sending is lost

    async def run(self, num_requests: int) -> None:
        """Asks so many times, and now and then loses its connection."""
        left = num_requests
        while left:
            share = self.rng.randint(1, left)
            left -= share
            vanishes = self.rng.random() < 0.2
            async with trio.open_nursery() as nursery:
                self._end = self.world.connect(self.name)
                self._calls, self._protocol, self._has_vanished = {}, ClientConnection(), False
                reader = trio.CancelScope()
                nursery.start_soon(self._read, reader)
                async with trio.open_nursery() as asking:
                    for _ in range(share):
                        asking.start_soon(self._ask)
                    if vanishes:
                        await trio.sleep(self.rng.random() * 2)
                        self.world.trace(self.name, "vanishes")
                        self._has_vanished = True
                        self._end.cut()
                        asking.cancel_scope.cancel()
                reader.cancel()
                await self._end.aclose()

    async def _ask(self) -> None:
        rng = self.rng
        await trio.sleep(rng.random() * 3)
        call = self._draw_call()
        options = PLAIN_STREAM
        if call.stream and rng.random() < 0.5:
            options = StreamOptions(credit=rng.choice((1, 2, 64)), coalesce=rng.random() < 0.5)
        msgid, data = self._protocol.request("stream" if call.stream else "generate", call.request, options)
        self._calls[msgid] = call
        self.world.trace(self.name, f"asks {msgid}: {call.request.token_ids} for {call.request.max_tokens}")
        await self._send(data)
        if rng.random() < 0.15:
            await trio.sleep(rng.random())
            if not call.finals:
                call.cancelled = True
                cancel = self._protocol.cancel(msgid)
                if cancel is not None:
                    await self._send(cancel)
                    if rng.random() < 0.3:
                        await self._send(cancel)  # a second one is nobody's harm
            return
        if options.credit is not None:
            stalls = rng.random() < 0.2
            while not call.finals:
                with trio.move_on_after(0.05 + rng.random() * 0.2):
                    await call.ended.wait()
                if not stalls and not call.finals:
                    await self._send(self._protocol.credit(msgid, rng.randint(1, 8)))
        await call.ended.wait()
        self._check_end(call, stalled=options.credit is not None and stalls)

    def _draw_call(self) -> Call:
        rng = self.rng
        shared = self.world.prefixes[rng.randrange(len(self.world.prefixes))][: rng.randint(0, 24)]
        prompt = shared + [rng.randrange(FIRST_PLAIN, VOCAB) for _ in range(rng.randint(1, 12))]
        harm = None
        if rng.random() < self.world.harm:
            harm = rng.choice((NAN, RAISE, DIE))
            prompt[rng.randrange(len(prompt))] = harm
        request = GenerateRequest(
            token_ids=prompt,
            max_tokens=rng.randint(1, 16),
            temperature=rng.choice((0.0, 0.0, 0.7)),
            seed=1,
            ignore_eos=True,
            n=rng.choice((1, 1, 1, 1, 2)),
            deadline_s=rng.choice((None, None, None, 0.2, 5.0)),
        )
        return Call(request, rng.random() < 0.6, harm, trio.current_time())

    async def _send(self, data: bytes) -> None:
        try:
            async with self._sending:
                await self._end.send_all(data)
        except trio.BrokenResourceError:
            assert self._has_vanished, f"{self.name}: the gateway closed a connection that did nothing wrong"

    # What comes back

    async def _read(self, scope: trio.CancelScope) -> None:
        splitter = MessageSplitter(MAX_TRANSPORT_BYTES)
        with scope:
            while data := await self._end.receive_some():
                for message in splitter.feed(data):
                    self._take(self._protocol.receive(message))  # raises where order or number are wrong

    def _take(self, event: object) -> None:
        match event:
            case TokenReceived(msgid, token):
                self._token(msgid, token)
            case TokensReceived(tokens):
                for received in tokens:
                    self._token(received.msgid, received.token)
            case Answered(int(msgid), value):
                self._final(msgid, value)
            case Failed(int(msgid), error):
                self._final(msgid, error)
            case Failed(None, error):
                raise AssertionError(f"{self.name}: told of a fault that is not its own: {error}")

    def _token(self, msgid: int, token: Any) -> None:
        call = self._calls[msgid]
        assert call.stream and not call.finals, "a token after the final, or of a call that does not stream"
        if token.choice == 0:
            call.tokens.append(token.token_id)

    def _final(self, msgid: int, end: object) -> None:
        call = self._calls[msgid]
        call.finals += 1
        assert call.finals == 1, "two finals"
        call.end = end
        call.ended.set()
        self.world.trace(self.name, f"final {msgid}: {end if isinstance(end, GenbatchError) else 'done'}")

    def _check_end(self, call: Call, *, stalled: bool) -> None:
        waited = trio.current_time() - call.asked_at
        deadline = call.request.deadline_s or 60.0
        if isinstance(call.end, GenbatchError):
            allowed = set(REFUSALS)
            if call.harm is not None:
                allowed |= {"engine_error"}
            if self.world.num_deaths:
                allowed |= {"engine_lost"}
            if stalled or waited >= 10.0:
                allowed |= {"cancelled"}
            assert call.end.code in allowed, f"{self.name}: {call.end!r} for {call}"
            if call.end.code == "engine_lost" and call.stream and call.request.n == 1:
                assert call.end.tokens_delivered == len(call.tokens), call
            return
        result = self.world.read_result(call.end)
        assert isinstance(result, Result)
        greedy = call.request.temperature == 0
        should = expected(call.request.token_ids or [], call.request.max_tokens or 0)
        assert call.harm is None or not result.token_ids, f"an answer to a prompt that does harm: {call}"
        if result.finish_reason == "length":
            assert len(result.token_ids) == len(should), call
        else:
            assert result.finish_reason == "deadline", (result, call)
            assert waited >= deadline, (waited, call)
        if greedy:
            assert result.token_ids == should[: len(result.token_ids)], (result.token_ids, should, call)
        assert not call.stream or call.tokens == result.token_ids, (call.tokens, result.token_ids)
