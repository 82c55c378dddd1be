"""A minute at three times what the service can do: who is refused learns it at once, and who is accepted is served."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import trio

from genbatch.actors.batcher.options import QUEUE_PER_SLOT, BatcherOptions
from genbatch.actors.scheduling.request import OUTPUT_WEIGHT, PROMPT_WEIGHT
from genbatch.clients.bench.runs import percentile
from genbatch.nif.models.loaded_model import Model
from genbatch.proto.errors import QueueFull
from genbatch.proto.messages import GenerateRequest
from tests.simulation.history_runner import FIRST_PLAIN, VOCAB
from tests.simulation.sim_service import SimCall, SimCaller, SimService, run_simulated

TinyModel = Callable[[str], Model]
SLOTS, PEAK_S, OVERLOAD_S = 4, 20.0, 60.0
OVERLOAD = 3.0


@dataclass
class Client:
    """Who asks.

    Args:
        name: of the connection.
        greed: its arrivals, as a share of what the whole service can do.
        most: its longest answer, in tokens.
    """

    name: str
    greed: float
    most: int
    calls: list[SimCall] = field(default_factory=list)

    def draw(self, rng: random.Random) -> GenerateRequest:
        prompt = [rng.randrange(FIRST_PLAIN, VOCAB) for _ in range(rng.randint(2, 8))]
        return GenerateRequest(token_ids=prompt, max_tokens=rng.randint(self.most // 2, self.most), ignore_eos=True)

    @property
    def tokens(self) -> int:
        """Of answers that were whole."""
        return sum(len(call.token_times) for call in self.calls if not isinstance(call.end, Exception))

    @property
    def cost(self) -> float:
        """What its answers are charged."""
        whole = [call for call in self.calls if not isinstance(call.end, Exception)]
        prompts = sum(len(call.request.token_ids or []) for call in whole)
        return PROMPT_WEIGHT * prompts + OUTPUT_WEIGHT * self.tokens

    @property
    def served(self) -> float:
        """Share of its calls that got an answer."""
        return sum(not isinstance(call.end, Exception) for call in self.calls) / len(self.calls)


async def peak(service: SimService) -> tuple[float, float]:
    """Tokens and requests a second with always as many at work as fit, and some that wait."""
    ends: list[tuple[float, int]] = []
    client = Client("saturating", 1.0, 12)
    caller, rng = service.connect("saturating"), random.Random(1)

    async def ask_on() -> None:
        while True:
            call = await caller.ask(client.draw(rng))
            await call.ended.wait()
            ends.append((call.ended_at, len(call.token_times)))

    begun = trio.current_time()
    with trio.move_on_after(PEAK_S):
        async with trio.open_nursery() as nursery:
            for _ in range(3 * SLOTS):
                nursery.start_soon(ask_on)
    # The line is long, so its start and its end weigh as much as in any other stretch.
    await caller.end.aclose()
    seconds = ends[-1][0] - begun
    return sum(tokens for _, tokens in ends) / seconds, len(ends) / seconds


async def ask_at_random(caller: SimCaller, client: Client, rate: float, rng: random.Random) -> None:
    """A Poisson process, whatever becomes of the calls."""
    until = trio.current_time() + OVERLOAD_S
    while True:
        await trio.sleep(rng.expovariate(rate))
        if trio.current_time() > until:
            return
        client.calls.append(await caller.ask(client.draw(rng)))


async def watch(service: SimService, seen: list[int]) -> None:
    """How many wait, every 10 ms."""
    while True:
        await trio.sleep(0.01)
        seen.append(len(service.batcher.requests) - len(service.batcher.slots.sequences))


@pytest.fixture
def model(tiny_model: TinyModel) -> Model:
    return tiny_model("llama")


def test_a_minute_at_three_times_the_capacity(model: Model) -> None:
    clients = [Client("greedy", 1.9, 16), Client("plain", 0.9, 8), Client("rare", 0.1, 8), Client("seldom", 0.1, 8)]
    assert sum(client.greed for client in clients) == pytest.approx(OVERLOAD)
    waiting: list[int] = []
    peaks: list[float] = []
    begun: list[float] = []

    async def story(service: SimService) -> None:
        tokens_per_s, requests_per_s = await peak(service)
        peaks.append(tokens_per_s)
        await service.come_to_rest()
        begun.append(trio.current_time())
        async with trio.open_nursery() as watching:
            watching.start_soon(watch, service, waiting)
            async with trio.open_nursery() as nursery:
                for number, client in enumerate(clients):
                    caller, rng = service.connect(client.name), random.Random(number)
                    nursery.start_soon(ask_at_random, caller, client, client.greed * requests_per_s, rng)
            for client in clients:
                for call in client.calls:
                    await call.ended.wait()
            watching.cancel_scope.cancel()

    run_simulated(story, model, BatcherOptions(n_parallel=SLOTS))

    calls = [call for client in clients for call in client.calls]
    refused = [call for call in calls if isinstance(call.end, Exception)]
    latencies = [call.ended_at - call.asked_at for call in refused]
    last = max(call.ended_at for call in calls)
    goodput = sum(client.tokens for client in clients) / (last - begun[0])
    assert all(call.finals == 1 for call in calls)
    assert {type(call.end) for call in refused} == {QueueFull}
    assert all(call.end.retry_after_ms > 0 for call in refused)
    assert len(refused) > len(calls) / 2
    assert percentile(latencies, 99) <= 0.05
    assert goodput >= 0.9 * peaks[0]
    assert max(waiting) <= QUEUE_PER_SLOT * SLOTS
    greedy, plain, *small = clients
    assert 0.85 <= greedy.cost / plain.cost <= 1.15  # of six draws of arrivals, 1.03 to 1.12
    assert all(client.served >= 0.95 for client in small)
