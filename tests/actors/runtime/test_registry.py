"""Registry: names that outlive the actors behind them."""

import pytest
import trio

from genbatch.actors.runtime.errors import ActorDown, NameTaken
from genbatch.actors.runtime.genserver import Exit, start
from genbatch.actors.runtime.registry import Registry
from tests.actors.runtime.probe import Probe


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
