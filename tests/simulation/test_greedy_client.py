"""One client that always has 64 requests open, and polite ones that come again when they are told to."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.slots import TURN_TOKENS
from genbatch.actors.scheduling.scheduler import SchedulerPolicy
from genbatch.nif.models.loaded_model import Model
from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import GenerateRequest
from tests.simulation.history_runner import BEGIN, FIRST_PLAIN, VOCAB, hash_with, likeliest
from tests.simulation.sim_service import STEP_S, SimCall, SimCaller, SimService, run_simulated

TinyModel = Callable[[str], Model]
SLOTS, GREEDY_OPEN, SECONDS = 8, 64, 40.0
# A greedy client asks again at once; in simulated time, which stands still meanwhile, that is as soon as this.
AT_ONCE_S = 0.25


def answer_to(request: GenerateRequest) -> list[int]:
    """The likeliest tokens of one answer, alone."""
    assert request.token_ids is not None and request.max_tokens is not None
    value, tokens = BEGIN, list[int]()
    for token in request.token_ids:
        value = hash_with(value, token)
    for _ in range(request.max_tokens):
        tokens.append(likeliest(value))
        value = hash_with(value, tokens[-1])
    return tokens


@dataclass
class Client:
    """What became of one client's requests."""

    name: str
    max_tokens: int
    waits: list[float] = field(default_factory=list)  # seconds until the first token of those served
    refused: int = 0

    def draw(self, rng: random.Random, **fields: object) -> GenerateRequest:
        prompt = [rng.randrange(FIRST_PLAIN, VOCAB) for _ in range(8)]
        return GenerateRequest(token_ids=prompt, max_tokens=self.max_tokens, ignore_eos=True, **fields)

    def book(self, call: SimCall) -> None:
        if isinstance(call.end, GenbatchError):
            self.refused += 1
        else:
            self.waits.append(call.token_times[0] - call.asked_at)


async def take_all(caller: SimCaller, client: Client, rng: random.Random) -> None:
    """Keeps so many requests open, whatever it is told."""

    async def ask_on() -> None:
        while True:
            call = await caller.ask(client.draw(rng))
            await call.ended.wait()
            client.book(call)
            if isinstance(call.end, GenbatchError):
                await trio.sleep(AT_ONCE_S)

    async with trio.open_nursery() as nursery:
        for _ in range(GREEDY_OPEN):
            nursery.start_soon(ask_on)


async def ask_politely(caller: SimCaller, client: Client, rng: random.Random) -> None:
    """One request after another, each as often as it must and not before it is told to."""
    while True:
        call = await caller.ask(client.draw(rng))
        await call.ended.wait()
        client.book(call)
        if isinstance(call.end, GenbatchError):
            assert call.end.retry_after_ms is not None, call.end
            await trio.sleep(call.end.retry_after_ms / 1000)


def live_together(
    model: Model, greedy: list[Client], polite: list[Client], *, num_blocks: int = 2000, **options: object
) -> None:
    """A minute of all of them."""

    async def story(service: SimService) -> None:
        with trio.move_on_after(SECONDS):
            async with trio.open_nursery() as nursery:
                for number, client in enumerate(greedy):
                    nursery.start_soon(take_all, service.connect(client.name), client, random.Random(number))
                await trio.sleep(5.0)  # they have taken what they get
                for number, client in enumerate(polite):
                    caller, rng = service.connect(client.name), random.Random(100 + number)
                    nursery.start_soon(ask_politely, caller, client, rng)
        service.nursery.cancel_scope.cancel()

    run_simulated(story, model, BatcherOptions(n_parallel=SLOTS, **options), num_blocks=num_blocks)  # type: ignore[arg-type]


@pytest.fixture
def model(tiny_model: TinyModel) -> Model:
    return tiny_model("llama")


@pytest.mark.parametrize("policy", SchedulerPolicy)
def test_long_streams_of_one_client_give_way_to_others_and_keep_their_text(
    model: Model, policy: SchedulerPolicy
) -> None:
    """Eight streams hold all slots for minutes; who comes then waits for the end of a turn, or of a stream."""
    streams: list[SimCall] = []
    polite = [Client(f"polite {number}", 8) for number in range(3)]

    async def story(service: SimService) -> None:
        caller, rng = service.connect("greedy"), random.Random(0)
        streams.extend([await caller.ask(Client("greedy", 200).draw(rng, deadline_s=3000.0)) for _ in range(SLOTS)])
        await trio.sleep(5.0)
        assert len(service.batcher.slots.sequences) == SLOTS
        with trio.move_on_after(20.0):
            async with trio.open_nursery() as nursery:
                for number, client in enumerate(polite):
                    caller, rng = service.connect(client.name), random.Random(100 + number)
                    nursery.start_soon(ask_politely, caller, client, rng)
        for stream in streams:
            await stream.ended.wait()

    run_simulated(story, model, BatcherOptions(n_parallel=SLOTS, scheduler_policy=policy), num_blocks=2000)
    for stream in streams:
        assert stream.end["token_ids"] == answer_to(stream.request) and len(stream.token_times) == 200
    waits = [wait for client in polite for wait in client.waits]
    if policy is SchedulerPolicy.GUARANTEED_NO_EVICT:
        assert not waits, "this policy pauses nobody"
    else:
        assert len(waits) >= 3 * 10 and max(waits) <= (TURN_TOKENS + 2) * STEP_S


@pytest.mark.parametrize("num_greedy", [1, pytest.param(3, marks=pytest.mark.long)])
def test_polite_clients_are_served_beside_greedy_ones(model: Model, num_greedy: int) -> None:
    greedy = [Client(f"greedy {number}", 16) for number in range(num_greedy)]
    polite = [Client(f"polite {number}", 16) for number in range(3)]
    live_together(model, greedy, polite)
    assert all(client.refused > 0 for client in greedy)
    assert all(client.refused == 0 for client in polite)
    # A request takes two seconds alone, and at most as long until a slot is free.
    assert all(len(client.waits) >= 8 for client in polite), [len(client.waits) for client in polite]


@pytest.mark.parametrize("num_blocks", [45, pytest.param(30, marks=pytest.mark.long)])
def test_polite_clients_are_served_beside_a_greedy_one_where_memory_is_short(model: Model, num_blocks: int) -> None:
    """A request of the greedy client takes 26 blocks at its end, and one of the polite clients takes six."""
    greedy = [Client("greedy", 96)]
    polite = [Client(f"polite {number}", 16) for number in range(3)]
    live_together(model, greedy, polite, num_blocks=num_blocks, scheduler_policy=SchedulerPolicy.MAX_UTILIZATION)
    assert greedy[0].refused > 0
    assert all(client.refused == 0 and len(client.waits) >= 2 for client in polite)
    # One request of the greedy client may go on to its end before a newcomer's first token, and not a second one.
    assert max(wait for client in polite for wait in client.waits) <= (96 + 16) * STEP_S
    served = [len(client.waits) for client in polite]
    assert max(served) - min(served) <= 1, served


@pytest.mark.parametrize("space", [0.0, 0.001], ids=["evaluated anew", "swapped"])
def test_a_request_that_fills_the_pool_gives_way_to_polite_clients_and_keeps_its_text(
    model: Model, space: float
) -> None:
    """Each of the greedy client's requests keeps the pool from everybody for 147 steps, and three are always open."""
    streams: list[SimCall] = []
    polite = [Client(f"polite {number}", 8) for number in range(3)]
    pauses = swaps = 0

    async def fill(caller: SimCaller, rng: random.Random) -> None:
        while True:
            prompt = [rng.randrange(FIRST_PLAIN, VOCAB) for _ in range(100)]
            request = GenerateRequest(token_ids=prompt, max_tokens=147, ignore_eos=True, deadline_s=3000.0)
            streams.append(await caller.ask(request))
            await streams[-1].ended.wait()

    async def story(service: SimService) -> None:
        with trio.move_on_after(90.0):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(fill, service.connect("greedy"), random.Random(0))
                await trio.sleep(3.0)
                for number, client in enumerate(polite):
                    caller, rng = service.connect(client.name), random.Random(100 + number)
                    nursery.start_soon(ask_politely, caller, client, rng)
        nonlocal pauses, swaps
        pauses, swaps = service.batcher.stats.preemptions, service.batcher.stats.swaps
        service.nursery.cancel_scope.cancel()

    options = BatcherOptions(n_parallel=SLOTS, cpu_offload_space=space, margin=0.6)
    run_simulated(story, model, options, num_blocks=62)
    ended = [stream for stream in streams if stream.ended.is_set()]
    assert len(ended) >= 3, "the greedy client has its turns, too"
    for stream in ended:
        assert stream.end["token_ids"] == answer_to(stream.request) and len(stream.token_times) == 147
    # The second pause of a request comes after twice as many tokens as the first; alone a request takes 37 s.
    assert max(wait for client in polite for wait in client.waits) <= (2 * TURN_TOKENS + 4) * STEP_S
    assert all(len(client.waits) >= 10 for client in polite)
    assert pauses >= 4 and (swaps > 0) == (space > 0)
