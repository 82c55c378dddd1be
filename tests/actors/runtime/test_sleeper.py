"""One task sleeps, others wake it: no wake is lost, none comes twice, and a cancelled sleep takes none."""

import gc

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from genbatch.actors.runtime.sleeper import Sleeper


@pytest.mark.trio
async def test_a_task_sleeps_until_it_is_woken_again_and_again() -> None:
    sleeper, woken = Sleeper(), []

    async def sleep() -> None:
        for number in range(3):
            with assert_checkpoints():
                await sleeper
            woken.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep)
        for number in range(3):
            await wait_all_tasks_blocked()
            assert len(woken) == number
            sleeper.wake()
            sleeper.wake()  # the task is awake already
    assert woken == [0, 1, 2]


@pytest.mark.trio
async def test_a_wake_while_no_task_sleeps_does_nothing() -> None:
    sleeper = Sleeper()
    sleeper.wake()
    with trio.move_on_after(1) as scope:
        await sleeper
    assert scope.cancelled_caught


@pytest.mark.trio
async def test_a_cancelled_sleep_ends_and_another_task_may_sleep() -> None:
    sleeper, woken = Sleeper(), []

    async def sleep(name: str) -> None:
        await sleeper
        woken.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep, "first")
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        sleeper.wake()  # before the cancelled task has run
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep, "second")
        await wait_all_tasks_blocked()
        sleeper.wake()
        nursery.cancel_scope.cancel()  # after the wake
    assert woken == ["second"]


@pytest.mark.trio
async def test_a_sleep_keeps_nothing_of_its_task() -> None:
    class Held:
        pass

    sleeper = Sleeper()

    async def sleep(held: Held) -> None:
        await sleeper

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep, Held())
        await wait_all_tasks_blocked()
        sleeper.wake()
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Held]
