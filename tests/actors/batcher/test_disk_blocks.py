"""Prompts from before a restart are read from the disk between steps; a fault of the disk changes no answer."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from genbatch.actors.batcher import open_requests
from genbatch.actors.batcher.messages import Generate
from genbatch.nif.kv.disk_cache import DiskCache
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.native.runner import native_runner
from genbatch.proto.messages import GenerateRequest, Result, Token
from genbatch.proto.service_messages import StatsRequest
from tests.actors.batcher.bench import Bench, batcher, gather, prompt_of
from tests.nif.native.models import build_native_model
from tests.nif.tiny_models import build_tokenizer
from tests.waiting import a_moment

pytestmark = pytest.mark.trio

PROMPT = prompt_of(70, 1)  # 17 whole blocks before the last token
USUAL = {"max_tokens": 12, "seed": 4, "temperature": 0.8, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = build_native_model("llama", tmp_path_factory.mktemp("llama"), build_tokenizer)
    return load_model(str(directory), dtype="float32", n_gpu_layers=0)


def native(model: Model) -> Any:
    return native_runner(model, n_threads=1)


def on(folder: Path, made: list[DiskCache] | None = None) -> Callable[[Any], DiskCache]:
    def open_disk(runner: Any) -> DiskCache:
        disk = DiskCache(folder, "model", 2**30, runner.bytes_per_block(0, 4))
        if made is not None:
            made.append(disk)
        return disk

    return open_disk


def bench(model: Model, folder: Path | None, made: list[DiskCache] | None = None, **options: Any) -> Any:
    new_disk = None if folder is None else on(folder, made)
    return batcher(model, new_runner=native, new_disk=new_disk, usual=USUAL, **options)


async def counters(bench: Bench) -> dict[str, int]:
    stats: Any = await bench.ref.call(StatsRequest())
    found: dict[str, int] = stats["prefix_disk"]
    return found


def learned(disk: DiskCache) -> None:
    """Wait until the disk knows its files."""
    disk._queue.put(None)
    disk._thread.join()


async def test_answers_are_the_same_with_the_disk_off_on_cold_and_warm(model: Model, tmp_path: Path) -> None:
    requests = [
        {"token_ids": PROMPT},
        {"token_ids": PROMPT, "n": 2, "logprobs": 3},
        {"token_ids": PROMPT[:40] + prompt_of(20, 2), "tenant": "bob"},
        {"token_ids": PROMPT[:9]},
    ]
    results, made = [], list[DiskCache]()
    for folder in (None, tmp_path / "kv", tmp_path / "kv"):
        async with bench(model, folder, made) as running:
            if folder is not None:
                learned(made[-1])
                made[-1]._thread = threading.Thread(target=made[-1]._work, daemon=True)
                made[-1]._thread.start()
            results.append([await running.generate(**request) for request in requests])
            found = await counters(running)
    off, cold, warm = results
    strip = [[[(c.token_ids, c.logprobs, c.text) for c in one.choices] for one in all_] for all_ in (off, cold, warm)]
    assert strip[0] == strip[1] == strip[2]
    assert found["read"] >= 17 + 9 and not found["errors"] and not found["damaged"]
    cached = [[one.usage.cached_tokens for one in all_] for all_ in (cold, warm)]
    assert cached[0][0] == 0 and cached[1][0] == 68 and cached[1][2] >= 56


async def test_a_tenants_blocks_are_no_other_tenants(model: Model, tmp_path: Path) -> None:
    made = list[DiskCache]()
    async with bench(model, tmp_path / "kv", made) as running:
        await running.generate(token_ids=PROMPT, tenant="alice")
    async with bench(model, tmp_path / "kv", made) as running:
        learned(made[-1])
        assert (await running.generate(token_ids=PROMPT, tenant="bob")).usage.cached_tokens == 0
        assert (await running.generate(token_ids=PROMPT)).usage.cached_tokens == 0
        assert (await running.generate(token_ids=PROMPT, tenant="alice")).usage.cached_tokens == 68


async def test_a_damaged_block_is_evaluated_with_what_follows(model: Model, tmp_path: Path) -> None:
    made = list[DiskCache]()
    async with bench(model, tmp_path / "kv", made) as running:
        right = await running.generate(token_ids=PROMPT)
        names, _ = running.actor.ctx.kv.on_disk(made[-1], PROMPT, b"\0" * 8)
    assert len(names) == 17
    path = made[-1]._path(names[5])
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    async with bench(model, tmp_path / "kv", made) as running:
        learned(made[-1])
        again = await running.generate(token_ids=PROMPT)
        assert again.token_ids == right.token_ids and again.usage.cached_tokens == 20
        assert (await counters(running))["damaged"] == 1


async def test_blocks_are_copied_in_portions_with_steps_between(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[DiskCache]()
    async with bench(model, tmp_path / "kv", made) as running:
        right = await running.generate(token_ids=PROMPT)
    monkeypatch.setattr(open_requests, "PORTION_BYTES", 1)  # a block at a time
    order: list[str] = []
    async with bench(model, tmp_path / "kv", made) as running:
        learned(made[-1])
        ctx = running.actor.ctx
        restore = ctx.restore_prefix

        def recorded(names: list[bytes], contents: list[bytes]) -> int:
            order.append("copy")
            return restore(names, contents)

        monkeypatch.setattr(ctx, "restore_prefix", recorded)
        results: list[Result] = []
        first = trio.Event()

        def on_token(_: Token) -> None:
            first.set()
            order.append("token")

        async with trio.open_nursery() as nursery:

            async def stream() -> None:
                await running.generate(on_token, token_ids=prompt_of(5, 9), max_tokens=150)

            nursery.start_soon(stream)
            await first.wait()
            results.append(await running.generate(token_ids=PROMPT))
    assert results[0].token_ids == right.token_ids and results[0].usage.cached_tokens == 68
    assert order.count("copy") == 17
    copies = [index for index, what in enumerate(order) if what == "copy"]
    assert order[copies[0] : copies[-1]].count("token") >= 12  # one after most of 17 copies; some are told of later


async def test_a_full_pool_takes_what_fits(model: Model, tmp_path: Path) -> None:
    made = list[DiskCache]()
    async with bench(model, tmp_path / "kv", made) as running:
        right = await running.generate(token_ids=PROMPT)
    async with bench(model, tmp_path / "kv", made, num_blocks=[24]) as running:
        learned(made[-1])
        requests = [{"token_ids": prompt_of(30, seed)} for seed in range(5, 8)]
        results = await gather(running, [*requests, {"token_ids": PROMPT}, {"token_ids": PROMPT}])
    assert results[3].token_ids == results[4].token_ids == right.token_ids


async def test_a_disk_that_does_not_answer_is_waited_for_once(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    made = list[DiskCache]()
    async with bench(model, tmp_path / "kv", made) as running:
        right = await running.generate(token_ids=PROMPT)
    answers = threading.Event()
    async with bench(model, tmp_path / "kv", made) as running:
        learned(made[-1])
        read = made[-1].read

        def hang(names: list[bytes]) -> list[bytes]:
            answers.wait(60)
            return read(names)

        made[-1].read = hang  # type: ignore[method-assign, assignment]
        began = trio.current_time()
        first = await running.generate(token_ids=PROMPT)
        waited = trio.current_time() - began
        assert first.token_ids == right.token_ids and first.usage.cached_tokens == 0
        assert open_requests.LATE_S <= waited < 2 * open_requests.LATE_S
        began = trio.current_time()
        await running.generate(token_ids=PROMPT, tenant="other")
        assert trio.current_time() - began < open_requests.LATE_S
        assert "has not answered" in caplog.text and len(running.actor.disk) == 0
        answers.set()
    assert len(caplog.messages) == 1


async def test_a_caller_that_leaves_during_the_read_leaves_nothing(model: Model, tmp_path: Path) -> None:
    made = list[DiskCache]()
    async with bench(model, tmp_path / "kv", made) as running:
        await running.generate(token_ids=PROMPT)
    answers, asked = threading.Event(), trio.Event()
    token = trio.lowlevel.current_trio_token()
    async with bench(model, tmp_path / "kv", made) as running:
        learned(made[-1])
        read = made[-1].read

        def late(names: list[bytes]) -> list[bytes]:
            token.run_sync_soon(asked.set)
            answers.wait(60)
            return read(names)

        made[-1].read = late  # type: ignore[method-assign, assignment]
        async with trio.open_nursery() as nursery:
            request = GenerateRequest(**{**USUAL, "token_ids": PROMPT})
            nursery.start_soon(lambda: running.ref.call(Generate(request, None), timeout=None))
            await asked.wait()
            nursery.cancel_scope.cancel()
        answers.set()
        made[-1].read = read  # type: ignore[method-assign]
        while len(running.actor.disk):
            await a_moment()
        assert (await running.generate(token_ids=prompt_of(9, 3))).usage.completion_tokens == 12


async def test_more_than_the_bound_is_not_read_at_a_time(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[DiskCache]()
    async with bench(model, tmp_path / "kv", made) as running:
        await running.generate(token_ids=PROMPT)
    async with bench(model, tmp_path / "kv", made) as running:
        learned(made[-1])
        monkeypatch.setattr(open_requests, "MAX_READ_BYTES", 100)
        assert (await running.generate(token_ids=PROMPT)).usage.cached_tokens == 0
