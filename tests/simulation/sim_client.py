"""SimClient: a caller drawn by seed, over the real wire protocol, that checks every message it gets."""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from genbatch.nif.models.loaded_model import Model
from genbatch.proto.codec import MAX_TRANSPORT_BYTES, MessageSplitter
from genbatch.proto.errors import GenbatchError, Unavailable
from genbatch.proto.messages import Choice, Result, Token
from genbatch.proto.rpc import (
    PLAIN_STREAM,
    CallAnswered,
    CallFailed,
    ClientConnection,
    StreamOptions,
    TokenReceived,
    TokensReceived,
)
from tests.simulation.faults import Faults
from tests.simulation.pipe import End
from tests.simulation.sim_request import WORDS, SimRequest

# What a request may fail with when nothing but load is to blame.
REFUSALS = {"queue_full", "unavailable", "deadline_exceeded"}
# Seconds of silence after which a client that says so is taken for dead, and between two of its signs of life.
LEASE_S, HEARTBEAT_S = 3.0, 1.0


@dataclass
class Call:
    """One request or question and what came of it."""

    asked_at: float
    deaths_before: int = 0  # of what it may be lost by
    stream: bool = False
    tokens: dict[int, list[Token]] = field(default_factory=lambda: defaultdict(list))  # by choice
    end: Any = None  # plain data or error
    finals: int = 0
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))


class Service(Protocol):
    """What a client lives in: one engine's world, or a fleet's."""

    model: Model
    spread_s: float
    is_draining: bool
    gateways_die: bool
    deaths_to_lose: int  # so many of them may end a request
    faults: Faults
    is_calm: bool  # no more faults, and no more requests

    @property
    def default_deadline_s(self) -> float:
        """How long requests without a deadline may wait; 0 is for ever."""

    @property
    def num_deaths(self) -> int:
        """What a request may have been lost by, until now."""

    def connect(self, name: str) -> End:
        """A client's end of a new connection to the gateway."""

    def draw_request(self, rng: random.Random) -> SimRequest:
        """What a client asks next."""

    def read_result(self, value: Any) -> Result:
        """A final's plain data as the type that it is."""

    def trace(self, who: str, what: str) -> None:
        """Notes an event."""


class SimClient:
    """One connection after another to the gateway.

    Args:
        world: where it lives.
        name: for the trace.
        rng: draws all it does.
    """

    def __init__(self, world: Service, name: str, rng: random.Random) -> None:
        self.world = world
        self.name = name
        self.rng = rng
        self._calls: dict[int, Call] = {}
        self._protocol = ClientConnection()
        self._end: End
        self._asking: trio.Nursery
        self._sending = trio.Lock()
        self._has_vanished = False  # by its own will: what it was sending is lost

    async def run(self, num_requests: int) -> None:
        """Asks so many times, and now and then loses its connection."""
        left = num_requests
        while left and not self.world.is_calm:
            share = self.rng.randint(1, left)
            left -= share
            vanishes = self.rng.random() < 0.2 and self.world.faults.happens("vanish")
            async with trio.open_nursery() as nursery:
                self._end = self.world.connect(self.name)
                self._calls, self._protocol, self._has_vanished = {}, ClientConnection(), False
                nursery.start_soon(self._read)
                if self.rng.random() < 0.2:
                    nursery.start_soon(self._keep_alive)
                async with trio.open_nursery() as asking:
                    self._asking = asking
                    for _ in range(share):
                        asking.start_soon(self._ask)
                    if self.rng.random() < 0.3:
                        asking.start_soon(self._ask_question)
                    if vanishes:
                        await trio.sleep(self.rng.random() * 2)
                        self._vanish()
                        asking.cancel_scope.cancel()
                nursery.cancel_scope.cancel()
            await self._end.aclose()

    def _vanish(self) -> None:
        """So that the gateway sees it, or so that it never learns."""
        self._has_vanished = True
        if self.rng.random() < 0.7:
            self.world.trace(self.name, "vanishes")
            self._end.cut()
        else:
            self.world.trace(self.name, "is parted from the gateway")
            self._end.part()

    async def _ask(self) -> None:
        rng = self.rng
        await trio.sleep(rng.random() * self.world.spread_s)
        asked = self.world.draw_request(rng)
        call = Call(trio.current_time(), self.world.num_deaths, stream=rng.random() < 0.6)
        options = PLAIN_STREAM
        if call.stream and rng.random() < 0.5:
            options = StreamOptions(credit=rng.choice((1, 2, 64)), coalesce=rng.random() < 0.5)
        msgid, data = self._protocol.request("stream" if call.stream else "generate", asked.wanted, options)
        self._calls[msgid] = call
        self.world.trace(self.name, f"asks {msgid}: {asked.wanted}")
        await self._send(data)
        if rng.random() < 0.15 and self.world.faults.happens("cancel"):
            await self._cancel(msgid, call)
            return
        stalls = options.credit is not None and rng.random() < 0.2 and self.world.faults.happens("stall")
        if options.credit is not None:
            while not call.finals:
                with trio.move_on_after(0.05 + rng.random() * 0.2):
                    await call.ended.wait()
                if not stalls and not call.finals:
                    await self._send(self._protocol.credit(msgid, rng.randint(1, 8)))
        await call.ended.wait()
        if isinstance(call.end, GenbatchError):
            self._check_error(asked, call, stalled=stalls)
        else:
            self._check_result(asked, call)

    async def _cancel(self, msgid: int, call: Call) -> None:
        await trio.sleep(self.rng.random())
        if call.finals:
            return
        cancel = self._protocol.cancel(msgid)
        if cancel is not None:
            await self._send(cancel)
            if self.rng.random() < 0.3:
                await self._send(cancel)  # a second one is nobody's harm

    async def _ask_question(self) -> None:
        """What is no request is answered, too, however the engine is."""
        await trio.sleep(self.rng.random() * 3)
        words = self.rng.choice(WORDS)
        ids = self.world.model.tokenizer.encode(words)
        method, params, answer = self.rng.choice(
            (
                ("health", {}, None),
                ("stats", {}, None),
                ("models", {}, None),
                ("tokenize", {"prompt": words}, {"token_ids": ids}),
                ("detokenize", {"token_ids": ids}, {"text": words}),
            )
        )
        msgid, data = self._protocol.request(method, params)
        call = self._calls[msgid] = Call(trio.current_time())
        self.world.trace(self.name, f"asks {msgid}: {method}")
        await self._send(data)
        await call.ended.wait()
        if isinstance(call.end, GenbatchError):
            assert isinstance(call.end, Unavailable) and method != "health", (method, call.end)
        else:
            assert answer is None or call.end == answer, (method, params, call.end)

    async def _keep_alive(self) -> None:
        """Has itself taken for dead after a while of silence, and is not silent."""
        while True:
            await self._send(self._protocol.heartbeat(LEASE_S))
            await trio.sleep(HEARTBEAT_S)

    async def _send(self, data: bytes) -> None:
        try:
            async with self._sending:
                await self._end.send_all(data)
        except trio.BrokenResourceError:
            is_fine = self._has_vanished or self.world.gateways_die
            assert is_fine, f"{self.name}: the gateway closed a connection that did nothing wrong"

    # What comes back

    async def _read(self) -> None:
        splitter = MessageSplitter(MAX_TRANSPORT_BYTES)
        while data := await self._end.receive_some():
            for message in splitter.feed(data):
                self._take(self._protocol.receive(message))  # raises where order or number are wrong
        if self.world.gateways_die and not self._has_vanished:
            self.world.trace(self.name, "has lost its gateway")
            self._has_vanished = True
            self._asking.cancel_scope.cancel()

    def _take(self, event: object) -> None:
        match event:
            case TokenReceived(msgid, token):
                self._token(msgid, token)
            case TokensReceived(tokens):
                for msgid, token in tokens:
                    self._token(msgid, token)
            case CallAnswered(int(msgid), value):
                self._final(msgid, value)
            case CallFailed(int(msgid), error):
                self._final(msgid, error)
            case CallFailed(None, error):
                raise AssertionError(f"{self.name}: told of a fault that is not its own: {error}")

    def _token(self, msgid: int, token: Token) -> None:
        call = self._calls[msgid]
        assert call.stream and not call.finals, "a token after the final, or of a call that does not stream"
        call.tokens[token.choice].append(token)

    def _final(self, msgid: int, end: object) -> None:
        call = self._calls[msgid]
        call.finals += 1
        assert call.finals == 1, "two finals"
        call.end = end
        call.ended.set()
        self.world.trace(self.name, f"final {msgid}: {end if isinstance(end, GenbatchError) else 'done'}")

    def _check_error(self, asked: SimRequest, call: Call, *, stalled: bool) -> None:
        allowed = set(REFUSALS)
        if asked.does_harm:
            allowed |= {"engine_error"}
        # One death is no reason to end: only a request that two may be due to, or one that is out of time.
        # Without a deadline of its own, a request waits for the next engine as long as the operator allows.
        wait_s = asked.wanted.deadline_s or self.world.default_deadline_s
        is_late = bool(wait_s) and trio.current_time() - call.asked_at >= wait_s
        if self.world.num_deaths - call.deaths_before >= (1 if is_late else self.world.deaths_to_lose):
            allowed |= {"engine_lost"}
        if stalled or self.world.is_draining or trio.current_time() - call.asked_at >= 10.0:
            allowed |= {"cancelled"}
        assert call.end.code in allowed, f"{self.name}: {call.end!r} for {asked}"
        if call.end.code == "deadline_exceeded" and asked.wanted.deadline_s is None:
            # A stream whose replica died waits for the next one, as a new request does.
            waited = not call.num_tokens or self.world.num_deaths > call.deaths_before
            assert self.world.default_deadline_s and waited, f"it did not wait for a slot: {call}"
        if call.end.code == "engine_lost" and call.stream:
            assert call.end.tokens_delivered == call.num_tokens, (asked, call)

    def _check_result(self, asked: SimRequest, call: Call) -> None:
        result = self.world.read_result(call.end)
        choices = result.choices
        assert len(choices) == asked.wanted.n
        for number, choice in enumerate(choices):
            if call.stream:
                assert [token.token_id for token in call.tokens[number]] == choice.token_ids, (asked, call)
                assert "".join(token.text for token in call.tokens[number]) == choice.text, (asked, call)
            if choice.finish_reason in ("length", "stop"):
                self._check_whole(asked, choice, number)
                continue
            if choice.finish_reason == "deadline":
                assert asked.wanted.deadline_s is not None, f"the operator's default ended an answer: {call}"
                assert trio.current_time() - call.asked_at >= asked.wanted.deadline_s, (asked, call)
            else:
                assert choice.finish_reason == "cancelled" and self.world.is_draining, (asked, choice)
            tokens = asked.answers[number].token_ids if asked.answers else []
            assert choice.token_ids == tokens[: len(choice.token_ids)], (choice, asked)
        if result.prompt_logprobs is not None:
            asked.check_prompt_logprobs(result.prompt_logprobs, is_whole=bool(result.token_ids))

    def _check_whole(self, asked: SimRequest, choice: Choice | Result, number: int) -> None:
        """An answer that was not cut short is the one that the request has alone."""
        assert not asked.does_harm or asked.wanted.max_tokens == 1, f"an answer after what does harm: {asked}"
        assert asked.answers, f"an answer to a prompt that does harm: {asked}"
        alone = asked.answers[number]
        same = (choice.token_ids, choice.text, choice.finish_reason) == (
            alone.token_ids,
            alone.text,
            alone.finish_reason,
        )
        assert same, (choice, alone, asked)
        for one, other in zip(choice.logprobs or (), alone.logprobs or (), strict=True):
            assert one.token_id == other.token_id and abs(one.logprob - other.logprob) < 1e-4, (one, other)
