"""Registry: names that outlive the actors behind them.

Supervisor: ordered start, restarts by strategy within a limit, reverse stop with timeouts.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.runtime.actor import Exit, Reason, start
from genbatch.actors.runtime.errors import ActorDown, NameTaken, RestartLimit, StartFailed
from genbatch.actors.runtime.supervisor import ChildSpec, Intensity, Registry, Strategy, Supervisor
from genbatch.actors.runtime.telemetry import Telemetry
from tests.actors.runtime.probe import Probe, crash


@pytest.mark.trio
async def test_a_named_ref_reaches_whoever_has_the_name_now(nursery: trio.Nursery) -> None:
    registry = Registry()
    named = registry.ref("probe")
    for number in range(2):
        actor = Probe()
        ref = await start(nursery, actor)
        registry.register("probe", ref)
        assert await named.call(number) == number
        await named.stop()
        assert ("terminate", Exit.NORMAL) in actor.log
        assert not named.alive


@pytest.mark.trio
async def test_a_name_nobody_has_is_down_for_every_use(nursery: trio.Nursery) -> None:
    named = Registry().ref("nobody")
    watcher = await start(nursery, Probe())
    assert not named.alive
    with pytest.raises(ActorDown, match="not running"):
        await named.call(1)
    with pytest.raises(ActorDown):
        named.cast(1)
    with pytest.raises(ActorDown):
        await named.wait()
    await named.stop()

    async def watch(probe: Probe) -> None:
        with pytest.raises(ActorDown):
            probe.monitor(named)

    await watcher.call(watch)


@pytest.mark.trio
async def test_a_name_is_taken_only_while_its_actor_runs(nursery: trio.Nursery) -> None:
    registry = Registry()
    first, second = await start(nursery, Probe()), await start(nursery, Probe())
    registry.register("probe", first)
    with pytest.raises(NameTaken):
        registry.register("probe", second)
    await first.stop()
    assert registry.whereis("probe") is None
    registry.register("probe", second)
    registry.unregister("probe", first)  # no longer its name
    assert registry.whereis("probe") is second
    registry.unregister("probe", second)
    assert registry.whereis("probe") is None


class Journal:
    """What the children of a test did, in order."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.failing_starts: dict[str, int] = {}  # child -> how many of its next starts fail

    def actor(self, name: str, **options: Any) -> ChildSpec:
        return ChildSpec(name, lambda: JournalActor(name, self), **options)

    def task(self, name: str, **options: Any) -> ChildSpec:
        async def run(*, task_status: trio.TaskStatus[None]) -> None:
            self.entries.append(f"+{name}")
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self.entries.append(f"-{name}")

        return ChildSpec(name, lambda: run, **options)

    def take(self) -> str:
        taken, self.entries = " ".join(self.entries), []
        return taken


class JournalActor(Probe):
    def __init__(self, name: str, journal: Journal) -> None:
        super().__init__()
        self.name, self.journal = name, journal

    async def init(self) -> None:
        if self.journal.failing_starts.get(self.name, 0) > 0:
            self.journal.failing_starts[self.name] -= 1
            raise OSError("cannot start")
        self.journal.entries.append(f"+{self.name}")

    async def terminate(self, reason: Reason) -> None:
        self.journal.entries.append(f"-{self.name}")


async def stop_with(actor: Probe) -> None:
    actor.stop(Exit.NORMAL)


async def stop_by_crash(supervisor: Supervisor, child: str, bug: Callable[[Probe], Any] = crash) -> None:
    supervisor.registry.ref(child).cast(bug)
    await wait_all_tasks_blocked()


@pytest.mark.trio
async def test_children_start_in_order_and_stop_in_reverse(nursery: trio.Nursery) -> None:
    journal = Journal()
    supervisor = Supervisor([journal.actor("a"), journal.task("b"), journal.actor("c")])
    async with trio.open_nursery() as inner:
        await inner.start(supervisor.run)
        assert journal.take() == "+a +b +c"
        assert await supervisor.registry.ref("a").call("hello") == "hello"
        inner.cancel_scope.cancel()
    assert journal.take() == "-c -b -a"
    assert not supervisor.registry._refs


@pytest.mark.trio
@pytest.mark.parametrize(
    ("strategy", "restarts"),
    [
        ("one_for_one", "-b +b"),
        ("rest_for_one", "-b -d -c +b +c +d"),
        ("one_for_all", "-b -d -c -a +a +b +c +d"),
    ],
)
async def test_a_strategy_says_who_restarts_with_a_crashed_child(strategy: Strategy, restarts: str) -> None:
    journal = Journal()
    children = [journal.actor("a"), journal.actor("b"), journal.task("c"), journal.actor("d")]
    supervisor = Supervisor(children, strategy=strategy)
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        journal.take()
        await stop_by_crash(supervisor, "b")
        assert journal.take() == restarts
        for child in "abd":
            assert await supervisor.registry.ref(child).call(child) == child
        nursery.cancel_scope.cancel()
    assert journal.take() == "-d -c -b -a"


@pytest.mark.trio
@pytest.mark.parametrize(
    ("restart", "after_crash", "after_normal_end"),
    [("permanent", "-a +a", "-a +a"), ("transient", "-a +a", "-a"), ("temporary", "-a", "-a")],
)
async def test_a_child_spec_says_which_ends_are_restarted(
    restart: Any, after_crash: str, after_normal_end: str
) -> None:
    for bug, expected in [(crash, after_crash), (stop_with, after_normal_end)]:
        journal = Journal()
        supervisor = Supervisor([journal.actor("a", restart=restart)])
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            journal.take()
            await stop_by_crash(supervisor, "a", bug)
            assert journal.take() == expected
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_temporary_child_is_stopped_with_its_siblings_and_stays_stopped() -> None:
    journal = Journal()
    children = [journal.actor("a"), journal.actor("b", restart="temporary")]
    supervisor = Supervisor(children, strategy="one_for_all")
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        journal.take()
        await stop_by_crash(supervisor, "a")
        assert journal.take() == "-a -b +a"
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_task_that_raises_is_restarted() -> None:
    attempts: list[int] = []

    async def gateway(*, task_status: trio.TaskStatus[None]) -> None:
        attempts.append(len(attempts))
        task_status.started()
        if len(attempts) < 3:
            raise OSError("the socket broke")
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        await nursery.start(Supervisor([ChildSpec("gateway", lambda: gateway)]).run)
        await wait_all_tasks_blocked()
        assert attempts == [0, 1, 2]
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_too_many_restarts_in_the_window_stop_everything_and_are_raised_bare(
    autojump_clock: MockClock,
) -> None:
    journal, telemetry = Journal(), Telemetry()
    events: list[str] = []
    telemetry.attach(lambda event, measurements, metadata: events.append(event))
    supervisor = Supervisor(
        [journal.actor("a"), journal.actor("b")],
        intensity=Intensity(max_restarts=2, max_seconds=10),
        telemetry=telemetry,
    )

    async def crash_on_and_off() -> None:
        for pause_s in (1, 6, 6, 6, 1):  # two in ten seconds are allowed, the last is a third
            await trio.sleep(pause_s)
            await stop_by_crash(supervisor, "b")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(crash_on_and_off)
        with pytest.raises(RestartLimit) as caught:
            await supervisor.run()
    assert isinstance(caught.value.__cause__, ValueError)
    assert journal.take() == "+a +b" + " -b +b" * 4 + " -b -a"
    assert events.count("supervisor.restart") == 4
    assert events.count("supervisor.gave_up") == 1


@pytest.mark.trio
async def test_a_supervisor_with_a_pause_never_gives_up_and_restarts_no_faster(autojump_clock: MockClock) -> None:
    journal = Journal()
    supervisor = Supervisor(
        [journal.actor("a"), journal.actor("b")],
        intensity=Intensity(max_restarts=2, max_seconds=100, pause_s=2.5),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        for is_late in (False, False, True, True, True):
            await stop_by_crash(supervisor, "b")
            await trio.sleep(2)
            assert (supervisor.registry.whereis("b") is None) == is_late
            await trio.sleep(1)
            assert supervisor.registry.whereis("b") is not None
        journal.failing_starts["b"] = 5
        await stop_by_crash(supervisor, "b")
        await trio.sleep(100)
        assert supervisor.registry.whereis("a") is not None and supervisor.registry.whereis("b") is not None
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_child_that_does_not_start_stops_those_before_it() -> None:
    journal = Journal()
    journal.failing_starts["b"] = 1
    supervisor = Supervisor([journal.actor("a"), journal.actor("b"), journal.actor("c")])
    with pytest.raises(StartFailed, match="'b'") as caught:
        await supervisor.run()
    assert isinstance(caught.value.__cause__, OSError)
    assert journal.take() == "+a -a"


@pytest.mark.trio
async def test_a_failing_start_is_raised_bare_through_nursery_start() -> None:
    journal = Journal()
    journal.failing_starts["a"] = 1
    async with trio.open_nursery() as nursery:
        with pytest.raises(StartFailed):
            await nursery.start(Supervisor([journal.actor("a")]).run)


@pytest.mark.trio
async def test_a_task_that_ends_without_starting_has_not_started() -> None:
    async def hasty(*, task_status: trio.TaskStatus[None]) -> None:
        return

    with pytest.raises(StartFailed) as caught:
        await Supervisor([ChildSpec("hasty", lambda: hasty)]).run()
    assert "task_status.started()" in str(caught.value.__cause__)


@pytest.mark.trio
@pytest.mark.parametrize(("failures", "survives"), [(2, True), (3, False)])
async def test_a_restart_that_fails_is_tried_again_and_counts_and_its_error_is_told(
    failures: int, survives: bool
) -> None:
    journal, telemetry = Journal(), Telemetry()
    faults: list[tuple[object, str]] = []
    telemetry.attach(
        lambda event, _, labels: (
            faults.append((labels["child_id"], str(labels["reason"]))) if event == "supervisor.start_failed" else None
        )
    )
    supervisor = Supervisor(
        [journal.actor("a"), journal.actor("b")],
        strategy="one_for_all",
        intensity=Intensity(max_restarts=3),
        telemetry=telemetry,
    )
    outcome: list[str] = []

    async def supervise() -> None:
        try:
            await supervisor.run()
        except RestartLimit as error:
            outcome.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervise)
        await wait_all_tasks_blocked()
        journal.take()
        journal.failing_starts["b"] = failures
        await stop_by_crash(supervisor, "b")
        retries = " +a -a" * failures
        assert journal.take() == "-b -a" + (retries + " +a +b" if survives else retries)
        gave_up = "supervisor 'supervisor' gave up on child 'b': more than 3 restarts within 5.0 s, the last after: "
        assert faults == [("b", "cannot start")] * failures
        assert outcome == ([] if survives else [gave_up + "cannot start"])
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_two_children_that_crash_at_once_cause_one_restart_of_all() -> None:
    journal = Journal()
    supervisor = Supervisor(
        [journal.actor("a"), journal.actor("b")], strategy="one_for_all", intensity=Intensity(max_restarts=1)
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        journal.take()
        supervisor.registry.ref("a").cast(crash)
        supervisor.registry.ref("b").cast(crash)
        await wait_all_tasks_blocked()
        assert sorted(journal.take().split()[:2]) == ["-a", "-b"]
        assert await supervisor.registry.ref("b").call("well again") == "well again"
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_an_actor_stuck_in_a_handler_is_cancelled_after_its_shutdown_time(autojump_clock: MockClock) -> None:
    async def get_stuck(_: Probe) -> None:
        await trio.sleep_forever()

    journal = Journal()
    async with trio.open_nursery() as nursery:
        supervisor = Supervisor([journal.actor("a", shutdown=7)])
        await nursery.start(supervisor.run)
        supervisor.registry.ref("a").cast(get_stuck)
        await wait_all_tasks_blocked()
        begun = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() == begun + 7
    assert journal.take() == "+a -a"


@pytest.mark.trio
async def test_a_task_that_ignores_its_cancellation_is_reported_and_waited_for(autojump_clock: MockClock) -> None:
    async def stubborn(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(60)

    telemetry = Telemetry()
    overdue: list[object] = []
    telemetry.attach(lambda event, measurements, metadata: overdue.append((event, metadata["child_id"])))
    async with trio.open_nursery() as nursery:
        spec = ChildSpec("stubborn", lambda: stubborn, shutdown=2)
        await nursery.start(Supervisor([spec], telemetry=telemetry).run)
        begun = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() == begun + 60
    assert ("supervisor.child_overdue", "stubborn") in overdue


@pytest.mark.trio
async def test_cancelling_during_a_long_start_does_not_wait_for_it() -> None:
    class SlowToStart(JournalActor):
        async def init(self) -> None:
            await trio.sleep_forever()

    journal = Journal()
    slow = ChildSpec("slow", lambda: SlowToStart("slow", journal))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Supervisor([journal.actor("a"), slow]).run)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert journal.take() == "+a -a"  # no terminate for what did not start


@pytest.mark.trio
async def test_a_supervisor_may_supervise_supervisors() -> None:
    journal = Journal()
    inner: list[Supervisor] = []

    def make_inner() -> Callable[..., Any]:
        inner.append(Supervisor([journal.actor("b"), journal.actor("c")], intensity=Intensity(max_restarts=0)))
        return inner[-1].run

    outer = Supervisor([journal.actor("a"), ChildSpec("inner", make_inner), journal.actor("d")])
    async with trio.open_nursery() as nursery:
        await nursery.start(outer.run)
        assert journal.take() == "+a +b +c +d"
        await stop_by_crash(inner[0], "b")  # more than the inner one takes
        assert journal.take() == "-b -c +b +c"
        assert await inner[1].registry.ref("b").call("well again") == "well again"
        nursery.cancel_scope.cancel()
    assert journal.take() == "-d -c -b -a"


@pytest.mark.trio
async def test_a_call_under_way_fails_and_the_next_reaches_the_restarted_child() -> None:
    journal = Journal()
    async with trio.open_nursery() as nursery:
        supervisor = Supervisor([journal.actor("a")])
        await nursery.start(supervisor.run)
        named = supervisor.registry.ref("a")
        with pytest.raises(ActorDown) as caught:
            await named.call(crash)
        assert isinstance(caught.value.__cause__, ValueError)
        assert "in crash" in caught.value.__cause__.__notes__[0]  # where it happened stays readable
        await wait_all_tasks_blocked()
        assert await named.call("well again") == "well again"
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_crashed_actors_state_is_freed_although_its_ref_and_its_error_are_kept() -> None:
    states: list[weakref.ref[Probe]] = []

    def make() -> Probe:
        actor = Probe()
        states.append(weakref.ref(actor))
        return actor

    async def crash_deep(actor: Probe) -> None:
        try:
            await crash(actor)
        except ValueError as error:
            raise RuntimeError("with a cause") from error

    async with trio.open_nursery() as nursery:
        supervisor = Supervisor([ChildSpec("a", make)])
        await nursery.start(supervisor.run)
        ref = supervisor.registry.whereis("a")
        assert ref is not None
        with pytest.raises(ActorDown) as caught:
            await ref.call(crash_deep)
        await wait_all_tasks_blocked()
        gc.collect()
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert [state() is not None for state in states] == [False, True]
        nursery.cancel_scope.cancel()
