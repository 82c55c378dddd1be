"""Worker: one thread, jobs in order, results on the event loop's thread."""

import threading
import weakref

import outcome
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from genbatch.actors.runtime.errors import ActorDown, WorkerClosed
from genbatch.actors.runtime.worker import SharedWorker, Worker


@pytest.mark.trio
async def test_every_job_runs_on_the_same_thread_which_is_not_the_loops() -> None:
    worker = Worker("worker")
    idents = {await worker.run(threading.get_ident) for _ in range(20)}
    assert len(idents) == 1
    assert threading.get_ident() not in idents
    await worker.close()
    assert idents.isdisjoint(thread.ident for thread in threading.enumerate())


@pytest.mark.trio
async def test_run_returns_the_result_or_raises_the_exception() -> None:
    worker = Worker("worker")
    assert await worker.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await worker.run(divmod, 7, 0)
    assert await worker.run(max, 1, 2) == 2
    await worker.close()


@pytest.mark.trio
async def test_jobs_run_in_order_and_on_done_is_called_on_the_loops_thread() -> None:
    worker = Worker("worker")
    done: list[tuple[int, int]] = []
    for number in range(50):
        worker.submit(lambda n: n, number, on_done=lambda result: done.append((result.unwrap(), threading.get_ident())))
    await worker.close()  # waits for all of them
    assert done == [(number, threading.get_ident()) for number in range(50)]


@pytest.mark.trio
async def test_the_loop_stays_responsive_while_a_job_runs() -> None:
    worker, gate = Worker("worker"), threading.Event()
    results: list[outcome.Outcome[bool]] = []
    worker.submit(gate.wait, on_done=results.append)
    for _ in range(100):
        await trio.lowlevel.checkpoint()
    assert results == []
    gate.set()
    await worker.close()
    assert [result.unwrap() for result in results] == [True]


@pytest.mark.trio
async def test_a_cancelled_wait_lets_the_job_finish_and_drops_its_outcome() -> None:
    worker, gate = Worker("worker"), threading.Event()
    ran: list[str] = []

    def job() -> None:
        gate.wait()
        ran.append("to the end")
        raise ValueError("nobody hears this")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run, job)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    gate.set()
    assert await worker.run(lambda: list(ran)) == ["to the end"]
    await worker.close()


@pytest.mark.trio
async def test_a_run_in_a_cancelled_scope_submits_nothing() -> None:
    worker = Worker("worker")
    ran: list[int] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await worker.run(ran.append, 1)
    await worker.close()
    assert ran == []


@pytest.mark.trio
async def test_an_outcome_for_an_actor_that_is_gone_is_dropped() -> None:
    def tell_dead_actor(_: object) -> None:
        raise ActorDown("batcher")

    worker = Worker("worker")
    worker.submit(int, on_done=tell_dead_actor)
    assert await worker.run(int) == 0
    await worker.close()


@pytest.mark.trio
async def test_a_closed_worker_refuses_jobs_and_may_be_closed_again() -> None:
    worker = Worker("worker")
    await worker.close()
    await worker.close()
    with pytest.raises(WorkerClosed):
        await worker.run(int)
    with pytest.raises(WorkerClosed):
        worker.submit(int, on_done=lambda _: None)


@pytest.mark.trio
async def test_close_waits_for_the_job_in_flight() -> None:
    worker, gate = Worker("worker"), threading.Event()
    events: list[str] = []
    worker.submit(gate.wait, on_done=lambda _: events.append("job"))

    async def close() -> None:
        await worker.close()
        events.append("closed")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(close)
        await wait_all_tasks_blocked()
        assert events == []
        gate.set()
    assert events == ["job", "closed"]


def test_the_loops_end_ends_the_thread_of_a_worker_that_nobody_closed() -> None:
    gate = threading.Event()
    started: list[threading.Thread] = []

    async def main() -> None:
        worker = Worker("forgotten")
        started.append(await worker.run(threading.current_thread))
        worker.submit(gate.wait, on_done=lambda _: None)  # its outcome comes after the loop's end

    trio.run(main)
    gate.set()
    started[0].join(timeout=60)
    assert not started[0].is_alive()


@pytest.mark.trio
async def test_an_idle_worker_keeps_nothing_of_its_last_job() -> None:
    class Tensor:
        pass

    worker, tensor = Worker("worker"), Tensor()
    freed = threading.Event()
    weakref.finalize(tensor, freed.set)
    worker.submit(id, tensor, on_done=lambda _: None)
    del tensor
    assert freed.wait(timeout=60)
    await worker.close()


@pytest.mark.trio
async def test_a_callback_that_raises_does_not_end_the_program(caplog: pytest.LogCaptureFixture) -> None:
    """The event loop itself calls it: what it raised would end everything in it."""
    worker, closed = Worker("worker"), Worker("closed")
    await closed.close()

    def raises(result: object) -> None:
        raise ZeroDivisionError("a bug")

    told: list[int] = []
    worker.submit(lambda: worker.tell(raises, 1), on_done=raises)
    worker.submit(lambda: 1, on_done=lambda _: closed.submit(lambda: 2, on_done=raises))
    worker.submit(lambda: 3, on_done=lambda result: told.append(result.unwrap()))
    await worker.close()
    assert told == [3]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError] * 2


@pytest.mark.trio
async def test_clients_of_a_shared_worker_take_turns_and_each_ones_jobs_run_in_order() -> None:
    worker, gate, order = Worker("worker"), threading.Event(), list[str]()
    shared = SharedWorker(worker)
    shared.submit("a", gate.wait, on_done=lambda _: None)
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        shared.submit(name[0], lambda name=name: name, on_done=lambda result: order.append(result.unwrap()))  # type: ignore[misc]
    gate.set()
    with trio.fail_after(100):
        while len(order) < 6:
            await trio.lowlevel.checkpoint()
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert not shared._waiting, "a client without jobs is forgotten"
    await worker.close()


@pytest.mark.trio
async def test_a_shared_worker_goes_on_after_a_job_that_fails_and_an_answer_that_is_not_understood(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, done = Worker("worker"), trio.Event()
    shared = SharedWorker(worker)
    shared.submit("a", lambda: 1 / 0, on_done=lambda result: result.unwrap())
    shared.submit("a", lambda: 1, on_done=lambda _: done.set())
    with trio.fail_after(100):
        await done.wait()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    await worker.close()


@pytest.mark.trio
async def test_what_waits_for_a_shared_worker_is_dropped_when_nobody_is_left_to_be_told_or_it_is_closed() -> None:
    worker, ran = Worker("worker"), list[int]()
    shared = SharedWorker(worker)

    def gone(_: object) -> None:
        raise ActorDown("actor")

    gate = threading.Event()
    shared.submit("a", gate.wait, on_done=gone)
    shared.submit("a", lambda: ran.append(1), on_done=lambda _: None)
    gate.set()
    await worker.run(lambda: None)
    await wait_all_tasks_blocked()
    assert not shared._waiting
    gate.clear()
    shared.submit("a", gate.wait, on_done=lambda _: None)
    shared.submit("a", lambda: ran.append(2), on_done=lambda _: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.close)
        await wait_all_tasks_blocked()
        gate.set()
    assert not ran
    with pytest.raises(WorkerClosed):
        shared.submit("a", gate.wait, on_done=lambda _: None)
