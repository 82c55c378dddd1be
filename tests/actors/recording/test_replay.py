"""A recorded Batcher, replayed without its model: every tick is the same, or the first other one is shown."""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.journal import Flight, unrecorded
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.recording import records
from genbatch.actors.recording.recorder import open_flight
from genbatch.actors.recording.records import Record, RecordError, RecordReader, RecordWriter
from genbatch.actors.recording.replay import Report, Timeline, replay
from genbatch.actors.runtime.actor import ActorRef, start
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import SchedulerPolicy
from genbatch.nif.context import Context
from genbatch.nif.errors import OptionError
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import RaggedBatch, Rows
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.errors import DeadlineExceeded, GenbatchError
from genbatch.proto.messages import GenerateRequest, Message, Token
from genbatch.proto.service_messages import DrainRequest
from tests.simulation.sim_worker import SimWorker

TinyModel = Callable[[str], Model]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"cpu_offload_space": 0.001, "default_deadline_s": 0.1, "max_answer_s": 0.4},
    {"scheduler_policy": SchedulerPolicy.GUARANTEED_NO_EVICT, "batching_type": BatchingType.INFLIGHT_BATCHING},
]


class FaultyRunner(TorchRunner):
    """Fails now and then, and cannot evaluate token 7."""

    def __init__(self, model: Model, rng: random.Random) -> None:
        super().__init__(model)
        self._rng = rng
        self.is_faulty = False  # while the Batcher opens

    def forward(self, batch: RaggedBatch) -> Rows:
        if self.is_faulty and (7 in batch.input_ids.tolist() or self._rng.random() < 0.03):
            raise RuntimeError("a planted fault")
        return super().forward(batch)


@dataclass
class Load:
    """Callers of a seed, over a pool that is too small for them; time is simulated, the model is real."""

    model: Model
    seed: int
    record: Path
    options: dict[str, Any] = field(default_factory=dict)
    num_requests: int = 24
    num_cut: int = 0  # answers that the operator's limit on their time has ended
    num_waited: int = 0  # requests that waited for a slot in vain

    def run(self) -> Batcher:
        self.rng = random.Random(self.seed)
        # As the simulation does: trio's order of tasks is the seed's, too.
        trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
        trio._core._run._r.seed(self.seed)
        trio.run(self._run, clock=MockClock(autojump_threshold=0))
        return self.batcher

    async def _run(self) -> None:
        options = BatcherOptions(
            **{
                "n_parallel": 4,
                "max_batch_tokens": 16,
                "max_held_prompts": 2,
                "system_prompts": ("You are terse.",),
                "record": str(self.record),
                "priority_ageing_s": 0.1,
                **self.options,
            }
        )
        async with trio.open_nursery() as nursery:
            self.batcher = Batcher(
                lambda: self._open_context(options),
                options,
                open_worker=lambda _: self._open_worker(nursery),
                open_flight=open_flight,
            )
            self.ref = await start(nursery, self.batcher, name="batcher")
            assert isinstance(self.batcher.ctx.runner, FaultyRunner)
            self.batcher.ctx.runner.is_faulty = True
            async with trio.open_nursery() as callers:
                for _ in range(self.num_requests):
                    callers.start_soon(self._call, self.ref, random.Random(self.rng.random()))
            await self._drain(nursery)

    async def _drain(self, nursery: trio.Nursery) -> None:
        for _ in range(2):
            nursery.start_soon(self._call, self.ref, random.Random(self.rng.random()), 0.0)
        await wait_all_tasks_blocked()
        await self.ref.call(DrainRequest(timeout_s=0.2), timeout=None)
        await self.ref.stop()
        nursery.cancel_scope.cancel()

    def _open_worker(self, nursery: trio.Nursery) -> Any:
        return SimWorker(nursery, self.rng, 0.05)

    def _open_context(self, options: BatcherOptions) -> Context:
        return Context(
            self.model,
            FaultyRunner(self.model, self.rng),
            num_blocks=[26],
            n_parallel=options.n_parallel,
            n_held=options.max_held_prompts,
            n_batch=options.max_batch_tokens,
            block_size=4,
        )

    async def _call(self, ref: ActorRef, rng: random.Random, within_s: float = 3.0) -> None:
        await trio.sleep(rng.random() * within_s)
        with trio.move_on_after(rng.choice((0.3, 60.0, 60.0))):  # its caller leaves
            with suppress(GenbatchError):
                asked = self._generate(rng)
                try:
                    result = await ref.call(asked, timeout=None)
                except DeadlineExceeded as error:
                    self.num_waited += "no slot was free" in str(error)
                    raise
                num_most = max(len(choice.token_ids) for choice in result.choices)
                self.num_cut += result.finish_reason == "length" and num_most < (asked.request.max_tokens or 0)

    def _generate(self, rng: random.Random) -> Generate:
        width = rng.choice((1, 1, 1, 1, 3))
        wanted: dict[str, Any] = {
            "max_tokens": rng.randint(1, 40),
            "deadline_s": rng.choice((None, None, 0.5)),
            "ignore_eos": rng.random() < 0.5,
            "prompt_logprobs": rng.choice((None, None, 2)),
            "logprobs": rng.choice((None, 2)),
            "tenant": rng.choice(("", "a", "b")),
            "priority": rng.choice((0, 1)),
            "seed": rng.randrange(100),
        }
        if width == 1:
            wanted |= {"n": rng.choice((1, 1, 2)), "temperature": rng.choice((0.0, 1.5)), "stop": ["a", "e"]}
            wanted["reasoning_effort"] = "low" if wanted["seed"] % 3 == 0 else None
        match rng.choice((0, 1, 1, 2)):
            case 0:
                wanted["prompt"] = "The capital of France is " * rng.randint(1, 3)
            case 1:
                system = rng.choice(("You are terse.", "You are kind.", "You are very kind, and you know it."))
                turn = Message(role="user", content=rng.choice(("Hello", "Who are you?")))
                wanted["messages"] = [Message(role="system", content=system), turn]
            case 2:
                wanted["token_ids"] = [rng.choice((7, *range(10, 300))) for _ in range(rng.randint(1, 30))]
        fails_at = rng.choice((*7 * [None], 4))

        def on_token(token: Token) -> None:
            if token.index == fails_at:
                raise ValueError("the caller's own fault")

        return Generate(GenerateRequest(**wanted), on_token, client=rng.choice(("x", "y")), beam_width=width)


def played(path: Path, **options: Any) -> tuple[Report, list[Record]]:
    """A replay, and what it showed."""
    shown: list[Record] = []
    report = replay(path, changes=options, follow=lambda _, record: shown.append(record))
    return report, shown


@pytest.fixture(scope="module")
def recorded(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a load."""
    path = tmp_path_factory.mktemp("recorded") / "load.flight"
    Load(tiny_model("llama"), 0, path).run()
    return path


def test_recorded_loads_replay_to_the_same_ticks(tiny_model: TinyModel, tmp_path: Path) -> None:
    met: set[str | None] = set()
    for seed in (10, 16, 19, 21, 22, 24, 28):
        path = tmp_path / f"{seed}.flight"
        load = Load(tiny_model("llama"), seed, path, OPTIONS[seed % 3])
        batcher = load.run()
        report, shown = played(path)
        assert report.difference is None, f"seed {seed}: {report}"
        assert report.fault is None and report.end is not None
        ticks = [record for record in shown if isinstance(record, records.TickRecord)]
        assert report.num_ticks == len(ticks) > 50
        met |= set(batcher.stats.finished) | {
            record.fault for record in shown if isinstance(record, records.SteppedRecord)
        }
        met |= {type(record).__name__ for record in shown}
        arrived = [record for record in shown if isinstance(record, records.Arrived)]
        met |= {f"n {record.params.n}" for record in arrived} | {f"beams {record.beam_width}" for record in arrived}
        draws = [draw for record in shown if isinstance(record, records.SteppedRecord) for draw in record.draws if draw]
        met |= {draw.end for draw in draws}
        met |= {"held" for tick in ticks for group in tick.groups for part in group if part.request == 0}
        met |= {"budget" for tick in ticks if tick.prompt_budget is not None}
        met |= {"paused"} if batcher.stats.preemptions else set()
        met |= {"swapped"} if batcher.stats.swaps else set()
        met |= {"answer cut"} if load.num_cut else set()
        met |= {"waited in vain"} if load.num_waited else set()
    wanted = {"cancelled", "deadline", "error", "stop", "length", "fault", "Left", "DrainOverRecord", "n 2", "beams 3"}
    assert wanted | {"held", "budget", "paused", "swapped", "answer cut", "waited in vain", records.RAISED} <= met, met


def test_a_function_that_raises_at_the_last_token_of_one_choice_replays(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The other choices end with it, though their own texts would have gone on."""

    class Raising(Load):
        raises_at: tuple[int, int] | None = None  # choice and index

        async def _call(self, ref: ActorRef, rng: random.Random, within_s: float = 3.0) -> None:
            def on_token(token: Token) -> None:
                if (token.choice, token.index) == self.raises_at:
                    raise ValueError("the caller's own fault")

            request = GenerateRequest(
                token_ids=[30, 31], max_tokens=20, n=2, temperature=1.5, seed=3, stop_token_ids=list(range(40, 56))
            )
            with suppress(GenbatchError):
                self.result = await ref.call(Generate(request, on_token), timeout=None)

    quiet = Raising(tiny_model("llama"), 9, tmp_path / "quiet.flight", num_requests=1)
    quiet.run()
    lengths = [len(choice.token_ids) for choice in quiet.result.choices]
    assert lengths[0] != lengths[1], "one choice ends by itself, and before the other"
    path = tmp_path / "raised.flight"
    raising = Raising(tiny_model("llama"), 9, path, num_requests=1)
    raising.raises_at = lengths.index(min(lengths)), min(lengths) - 1
    raising.run()
    report, shown = played(path)
    assert report.difference is None, report
    ends = {draw.end for record in shown if isinstance(record, records.SteppedRecord) for draw in record.draws if draw}
    assert records.RAISED in ends


def test_a_sliding_window_and_another_scheduler_replay_too(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "load.flight"
    Load(tiny_model("mistral"), 1, path, {"scheduler": "prefill_first", "fair_share": False}).run()
    report, _ = played(path)
    assert report.difference is None and report.num_ticks > 50


def test_the_first_tick_that_another_scheduler_plans_differently_is_shown(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tmp_path / "load.flight"
    Load(tiny_model("llama"), 2, path, {"max_batch_tokens": 4}).run()
    report, shown = played(path, scheduler="prefill_first")
    assert report.difference is not None and report.message is not None
    tick, planned = report.difference
    ticks = [record for record in shown if isinstance(record, records.TickRecord)]
    assert tick == ticks[report.num_ticks] and planned is not None and planned != tick


@pytest.mark.parametrize("lost", [1, 9, 1000])
def test_a_record_that_was_cut_off_replays_to_its_end(recorded: Path, tmp_path: Path, lost: int) -> None:
    path = tmp_path / "cut.flight"
    path.write_bytes(recorded.read_bytes()[:-lost])
    report, _ = played(path)
    assert report.difference is None and report.end is None
    assert report.fault is not None and "the file ends inside record" in report.fault
    assert 50 < report.num_ticks <= played(recorded)[0].num_ticks


def test_a_record_replays_up_to_where_it_is_damaged(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.flight"
    data = bytearray(recorded.read_bytes())
    data[data.index(b"stepped", len(data) // 2)] ^= 0xFF
    path.write_bytes(data)
    report, _ = played(path)
    assert report.difference is None and report.num_ticks > 10
    assert report.fault is not None and "damaged" in report.fault


def test_the_end_of_a_record_is_a_plain_sentence(recorded: Path) -> None:
    assert played(recorded)[0].end == "the batcher has stopped"


def test_a_record_that_lacks_a_message_is_another_flight(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "forged.flight"
    kept = list(RecordReader(recorded))
    kept.remove(next(record for record in kept if isinstance(record, records.EncodedRecord)))
    writer = RecordWriter(str(path), 2**30)
    for record in kept:
        writer.write(record)
    writer.close()
    assert played(path)[0].difference is not None


def test_the_file_is_for_its_owner_and_is_never_written_over(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "load.flight"
    path.write_text("mine")
    Load(tiny_model("llama"), 3, path, num_requests=2).run()
    assert path.read_text() == "mine"
    made = tmp_path / "load.flight.1"
    assert made.stat().st_mode & 0o777 == 0o600
    assert played(made)[0].difference is None


def test_a_link_that_was_put_where_a_record_is_to_be_leads_nowhere(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "load.flight"
    path.symlink_to(tmp_path / "theirs")
    Load(tiny_model("llama"), 3, path, num_requests=2).run()
    assert not (tmp_path / "theirs").exists()
    assert played(tmp_path / "load.flight.1")[0].difference is None


def test_a_recording_ends_at_its_limit_and_the_service_goes_on(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "load.flight"
    batcher = Load(tiny_model("llama"), 3, path, {"record_limit": 0}, num_requests=2).run()
    assert batcher.stats.accepted
    assert path.stat().st_size < 100
    with pytest.raises(RecordError, match="no header"):
        replay(path)


def test_a_line_says_what_each_entry_of_a_step_has_drawn() -> None:
    header = cast(records.Header, SimpleNamespace(time=1.0))
    draws = [records.Draw(token=7), None, records.Draw(token=2, end="stop"), records.Draw(fault="nan")]
    line = Timeline().line(header, records.SteppedRecord(time=1.5, draws=draws))
    assert line == "  0.500000  a step ends: 7 - 2 (stop) (nan)"


def test_what_cannot_be_recorded_is_told_at_the_start(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(OptionError, match="record.*cannot be made")):
        Load(tiny_model("llama"), 3, tmp_path / "none" / "load.flight").run()
    other = tmp_path / "other"
    other.write_text("something else")
    with pytest.raises(RecordError, match="is no flight record"):
        replay(other)


def test_a_batcher_that_was_given_no_recorder_refuses_to_record() -> None:
    with pytest.raises(OptionError, match=r"^record: "):
        unrecorded(BatcherOptions(record="the.flight"))
    assert type(unrecorded(BatcherOptions())) is Flight
