"""Adapters of a running Batcher: who asks by name gets PEFT's text, whoever else asks, and nobody gets another's KV."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from genbatch import open_batcher
from genbatch.actors.gateways.dispatcher import Caller, Dispatcher
from genbatch.actors.recording.replay import replay
from genbatch.clients.in_process import BatcherClient
from genbatch.nif.errors import OptionError
from genbatch.proto.errors import Forbidden, InvalidRequest, ModelNotFound
from genbatch.proto.messages import Result
from tests.actors import holding_scheduler
from tests.actors.holding_scheduler import ENDLESS
from tests.lora_adapters import PeftOracle, change_config, make_adapter
from tests.waiting import a_moment

PROMPT = [(7 * i) % 300 for i in range(40)]
NAMES = (None, "one", "two", "one")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "n_gpu_layers": 0,
    "n_ctx": 1024,
    "runner": "torch",
    "batch_timeout": 1.0,
    "block_size": 8,
}


@pytest.fixture(scope="module")
def base(tiny_model_dir: Callable[[str], Path]) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def dirs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "one": make_adapter(base, folder / "one", ["q_proj", "v_proj", "down_proj"], seed=1),
        "two": make_adapter(base, folder / "two", rank=3, seed=2),
    }


@pytest.fixture(scope="module")
def expected(base: Path, dirs: dict[str, Path]) -> PeftOracle:
    return PeftOracle(base, dirs)


def options(dirs: dict[str, Path], **others: Any) -> dict[str, Any]:
    return {**OPTIONS, "lora": [f"{name}={path}" for name, path in dirs.items()], **others}


async def ask_all(batcher: BatcherClient, prompts: list[list[int]], **params: Any) -> list[Result]:
    """One request of each name for each prompt, all at once."""
    results: dict[int, Result] = {}
    asked = [(name, prompt) for name in NAMES for prompt in prompts]

    async def ask(index: int, name: str | None, prompt: list[int]) -> None:
        results[index] = await batcher.generate(prompt, model=name, ignore_eos=True, **params)

    async with trio.open_nursery() as nursery:
        for index, (name, prompt) in enumerate(asked):
            nursery.start_soon(ask, index, name, prompt)
    return [results[index] for index in range(len(asked))]


@pytest.mark.trio
@pytest.mark.parametrize("pool", [{}, {"num_blocks": 21, "n_parallel": 8, "cpu_offload_space": 0.0}, {
    "num_blocks": 21, "n_parallel": 8, "cpu_offload_space": 1.0}])  # fmt: skip
async def test_requests_of_all_adapters_at_once_say_what_peft_says(
    base: Path, dirs: dict[str, Path], expected: PeftOracle, pool: dict[str, Any]
) -> None:
    prompts = [PROMPT[:17], PROMPT]
    async with open_batcher(str(base), **options(dirs, **pool)) as batcher:
        for _ in range(2):  # again, with what the first have left in the prefix cache
            found = [result.token_ids for result in await ask_all(batcher, prompts, max_tokens=12)]
            assert found == [expected.generate(name, prompt, 12) for name in NAMES for prompt in prompts]
        stats = await batcher.stats()
    assert stats["adapters"] == ["one", "two"] and stats["adapter_bytes"] > 0
    assert bool(stats["preemptions"] + stats["swaps"]) == bool(pool)


@pytest.mark.trio
async def test_answers_of_one_request_and_beams_have_its_adapter(
    base: Path, dirs: dict[str, Path], expected: PeftOracle
) -> None:
    async with open_batcher(str(base), **options(dirs)) as batcher:
        several = await batcher.generate(PROMPT, model="two", n=3, max_tokens=6, ignore_eos=True)
    assert [choice.token_ids for choice in several.choices] == [expected.generate("two", PROMPT, 6)] * 3


@pytest.mark.trio
async def test_no_adapter_finds_what_another_has_left(base: Path, dirs: dict[str, Path]) -> None:
    async with open_batcher(str(base), **options(dirs)) as batcher:
        found = []
        for name in (None, "one", "two", "one", None):
            result = await batcher.generate(PROMPT, model=name, max_tokens=2, ignore_eos=True)
            found.append(result.usage.cached_tokens)
        by_own_name = await batcher.generate(PROMPT, model=(await batcher.models())[0].id, max_tokens=2)
    assert found == [0, 0, 0, 39, 39] and by_own_name.usage.cached_tokens == 39


@pytest.mark.trio
async def test_held_prompts_are_held_for_one_adapter(base: Path, dirs: dict[str, Path], expected: PeftOracle) -> None:
    system = "The capital of France is Paris, and a pool of blocks is shared by every sequence."
    turns = [{"role": "system", "content": system}, {"role": "user", "content": "def attend(query)"}]
    async with open_batcher(str(base), **options(dirs, system_prompts=[system])) as batcher:
        tokens = await batcher.tokenize(messages=turns)
        cached = []
        for name in (None, "one", "one", "one"):
            result = await batcher.generate(messages=turns, model=name, max_tokens=8, ignore_eos=True)
            assert result.token_ids == expected.generate(name, tokens, 8)
            cached.append(result.usage.cached_tokens)
        assert cached[0] > 20 and cached[1] == 0 and cached[3] > 20  # configured prompts have no adapter
        before = (await batcher.stats())["held_prompts"]
        await batcher.unload_adapter("one")
        assert (await batcher.stats())["held_prompts"] == before - 1 == 1


@pytest.mark.trio
async def test_a_session_belongs_to_its_adapter(base: Path, dirs: dict[str, Path], expected: PeftOracle) -> None:
    turns = [{"role": "user", "content": "The capital of France is Paris. A pool of blocks is shared."}]
    async with open_batcher(str(base), **options(dirs)) as batcher:
        tokens = await batcher.tokenize(messages=turns)
        await batcher.generate(messages=turns, model="two", max_tokens=2)
        state = await batcher.save_session(turns, model="two")
        assert state and not await batcher.save_session(turns, model="one")
    async with open_batcher(str(base), **options(dirs)) as batcher:
        for other in (None, "one"):
            with pytest.raises(InvalidRequest, match="state"):
                await batcher.load_session(state, model=other)
        assert await batcher.load_session(state, model="two") > 8
        result = await batcher.generate(messages=turns, model="two", max_tokens=8, ignore_eos=True)
        assert result.usage.cached_tokens > 8 and result.token_ids == expected.generate("two", tokens, 8)
        with pytest.raises(ModelNotFound):
            await batcher.save_session(turns, model="three")


@pytest.mark.trio
async def test_models_are_listed_and_others_are_refused_by_name(base: Path, dirs: dict[str, Path]) -> None:
    async with open_batcher(str(base), **options(dirs, served_model_name="tiny")) as batcher:
        cards = await batcher.models()
        assert [(card.id, card.parent) for card in cards] == [("tiny", None), ("one", "tiny"), ("two", "tiny")]
        assert cards[1].n_ctx == cards[0].n_ctx
        for name in ("three", "", "x" * 1000):
            with pytest.raises(ModelNotFound, match="there is tiny, one, two") as caught:
                await batcher.generate("Hello", model=name)
            assert caught.value.field == "model"
        assert (await batcher.generate("Hello", model="tiny", max_tokens=1)).token_ids


@pytest.mark.trio
async def test_an_adapter_is_loaded_unloaded_and_loaded_again_as_another(
    base: Path, dirs: dict[str, Path], expected: PeftOracle, tmp_path: Path
) -> None:
    async with open_batcher(str(base), **OPTIONS) as batcher:
        for path, words in ((str(tmp_path / "nowhere"), "is not a directory"), ("relative", "absolute path")):
            with pytest.raises(InvalidRequest, match=words) as caught:
                await batcher.load_adapter("x", path)
            assert caught.value.field == "path"
        for name in ("one", "two"):
            cards = await batcher.load_adapter("x", str(dirs[name]))
            assert [card.id for card in cards][1:] == ["x"]
            found = await batcher.generate(PROMPT, model="x", max_tokens=8, ignore_eos=True)
            assert found.token_ids == expected.generate(name, PROMPT, 8) and found.usage.cached_tokens == 0
            with pytest.raises(InvalidRequest, match="with this name is loaded already"):
                await batcher.load_adapter("x", str(dirs[name]))
            assert (await batcher.unload_adapter("x")).num_cancelled == 0
            with pytest.raises(ModelNotFound):
                await batcher.generate(PROMPT, model="x")
        with pytest.raises(ModelNotFound, match="no adapter 'x' is loaded; there is none"):
            await batcher.unload_adapter("x")
        assert (await batcher.stats())["adapter_bytes"] == 0
        # What was evaluated with the same adapter is found again.
        await batcher.load_adapter("y", str(dirs["one"]))
        again = await batcher.generate(PROMPT, model="y", max_tokens=8, ignore_eos=True)
        assert again.token_ids == expected.generate("one", PROMPT, 8) and again.usage.cached_tokens == 39


@pytest.mark.trio
async def test_a_batcher_that_has_loaded_an_adapter_leaves_no_thread(base: Path, dirs: dict[str, Path]) -> None:
    def ours() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("genbatch-")}

    before = ours()
    async with open_batcher(str(base), **OPTIONS) as batcher:
        await batcher.load_adapter("x", str(dirs["one"]))
        assert "genbatch-adapters" in ours() - before
    assert ours() == before


@pytest.mark.trio
async def test_two_loads_of_a_name_at_once_are_one(base: Path, dirs: dict[str, Path]) -> None:
    ends: list[object] = []

    async with open_batcher(str(base), **OPTIONS) as batcher, trio.open_nursery() as nursery:

        async def load() -> None:
            try:
                ends.append(len(await batcher.load_adapter("x", str(dirs["one"]))))
            except InvalidRequest as error:
                ends.append(error.field)

        nursery.start_soon(load)
        nursery.start_soon(load)
    assert sorted(map(str, ends)) == ["2", "name"]


@pytest.mark.trio
async def test_unloading_waits_for_requests_and_then_ends_them(base: Path, dirs: dict[str, Path]) -> None:
    held = options(dirs, scheduler=holding_scheduler.NAME)
    async with open_batcher(str(base), **held) as batcher, trio.open_nursery() as nursery:
        ended: list[object] = []

        async def unload(timeout_s: float) -> None:
            ended.append((await batcher.unload_adapter("one", timeout_s)).num_cancelled)

        async with batcher.stream(PROMPT[:8], model="one", max_tokens=ENDLESS, ignore_eos=True) as stream:
            async for token in stream:
                if token.index == 2:
                    nursery.start_soon(unload, 1000.0)
                    while len(await batcher.models()) == 3:
                        await a_moment()
                    with pytest.raises(ModelNotFound):
                        await batcher.generate(PROMPT, model="one")
                    assert not ended and (await batcher.stats())["adapters"] == ["one", "two"]
                    await batcher.generate(PROMPT, model="two", max_tokens=2)
                    nursery.start_soon(unload, 0.0)
        assert stream.result.finish_reason == "cancelled"
        while len(ended) < 2:
            await a_moment()
        assert ended == [1, 1] and (await batcher.stats())["adapters"] == ["two"]


@pytest.mark.trio
async def test_only_the_operator_loads_and_unloads(base: Path, dirs: dict[str, Path]) -> None:
    async with open_batcher(str(base), **OPTIONS) as batcher:
        dispatcher = Dispatcher(batcher.service.batcher)
        for method, params in (
            ("load_adapter", {"name": "x", "path": str(dirs["one"])}),
            ("unload_adapter", {"name": "x"}),
        ):
            with pytest.raises(Forbidden):
                await dispatcher.call(method, params, Caller("c", tenant="alice"))


@pytest.mark.trio
async def test_tenants_with_one_adapter_share_nothing(base: Path, dirs: dict[str, Path]) -> None:
    async with open_batcher(str(base), **options(dirs)) as batcher:
        for tenant in ("a", "b"):
            result = await batcher.generate(PROMPT, model="one", tenant=tenant, max_tokens=2, ignore_eos=True)
            assert result.usage.cached_tokens == 0


@pytest.mark.trio
async def test_a_record_with_adapters_is_played_to_its_end(base: Path, dirs: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "flight"
    small = options(dirs, record=str(path), num_blocks=21, n_parallel=8, cpu_offload_space=1.0)
    async with open_batcher(str(base), **small) as batcher:
        for _ in range(2):
            await ask_all(batcher, [PROMPT[:17], PROMPT], max_tokens=12)
    report = await trio.to_thread.run_sync(replay, path)
    assert report.difference is None and report.fault is None and report.num_ticks > 20


@pytest.mark.trio
async def test_a_faulty_adapter_keeps_a_service_from_starting(
    base: Path, dirs: dict[str, Path], tmp_path: Path
) -> None:
    adapter = make_adapter(base, tmp_path / "a", ["q_proj"])
    change_config(adapter, use_dora=True)
    for sources, words in (
        ([f"a={adapter}"], "cannot load adapter 'a': adapter_config.json: use_dora"),
        ([f"a={dirs['one']}", f"a={dirs['two']}"], "with this name is loaded already"),
        (["a"], "is not NAME=DIR"),
        ("a=b", "a list of NAME=DIR"),
    ):
        with pytest.raises(OptionError, match=words) as caught:
            async with open_batcher(str(base), **{**OPTIONS, "lora": sources}):
                pass
        assert caught.value.option == "lora"


@pytest.mark.trio
async def test_a_caller_that_leaves_while_an_adapter_is_unloaded_frees_it(base: Path, dirs: dict[str, Path]) -> None:
    held = options(dirs, scheduler=holding_scheduler.NAME)
    async with open_batcher(str(base), **held) as batcher, trio.open_nursery() as nursery:
        left = trio.Event()

        async def ask() -> None:
            with trio.CancelScope() as scope:
                async with batcher.stream(PROMPT[:8], model="one", max_tokens=ENDLESS, ignore_eos=True) as stream:
                    async for _ in stream:
                        nursery.start_soon(batcher.unload_adapter, "one", 1000.0)
                        while len(await batcher.models()) == 3:
                            await a_moment()
                        scope.cancel()
            left.set()

        nursery.start_soon(ask)
        await left.wait()
        while (await batcher.stats())["adapters"] != ["two"]:
            await a_moment()
