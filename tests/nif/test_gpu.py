"""What only a GPU can show: bfloat16 kernels, captured graphs, steps that never wait for the device."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.nif.without_waiting import without_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def gpu_model(tiny_model_dir: Any) -> Any:
    """gpu_model("llama") on the GPU in float32."""
    from genbatch.nif.models.model import load_model

    loaded: dict[str, Any] = {}

    def model(family: str) -> Any:
        if family not in loaded:
            directory: Path = tiny_model_dir(family)
            loaded[family] = load_model(str(directory), dtype="float32")
        return loaded[family]

    return model


def decode_batch(groups: int, num_tokens: int, length: int) -> Any:
    """Row r decodes position length - 1 in its own two blocks."""
    from genbatch.nif.runner import RaggedBatch

    table = np.arange(2 * num_tokens, dtype=np.int32).reshape(num_tokens, 2)
    position = np.full(num_tokens, length - 1)
    slots = table[:, (length - 1) // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
    return RaggedBatch(
        input_ids=np.arange(num_tokens) + 3,
        positions=position,
        query_starts=np.arange(num_tokens + 1, dtype=np.int32),
        kv_lens=np.full(num_tokens, length, np.int32),
        slots=(slots,) * groups,
        block_tables=(table,) * groups,
        logit_rows=np.arange(num_tokens),
        max_query_len=1,
        max_kv_len=length,
    )


def runner_for(model: Any, **options: Any) -> Any:
    from genbatch.nif.runners.triton_runner import TritonRunner

    runner = TritonRunner(model, **options)
    runner.allocate([64] * len(model.groups), BLOCK_SIZE)
    return runner


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_h14_replay_equals_eager(gpu_model: Any, family: str) -> None:
    from genbatch.nif.engine_options import GraphOptions

    model = gpu_model(family)
    eager, graphed = runner_for(model), runner_for(model, graphs=GraphOptions(max_batch_size=16))
    for length in range(1, 20):
        batch = decode_batch(len(model.groups), 1 + length % 9, length)
        torch.testing.assert_close(graphed.forward(batch), eager.forward(batch), rtol=1e-5, atol=1e-5)


def test_a_cache_in_fp8_holds_rounded_numbers_and_is_replayed_as_it_runs_eagerly(gpu_model: Any) -> None:
    from genbatch.nif.engine_options import GraphOptions
    from genbatch.nif.runners.triton_runner import Precision

    model = gpu_model("llama")
    in_fp8 = Precision(cache="float8")
    plain, eager = runner_for(model), runner_for(model, precision=in_fp8)
    graphed = runner_for(model, precision=in_fp8, graphs=GraphOptions(max_batch_size=16))
    for length in range(1, 12):
        batch = decode_batch(len(model.groups), 9, length)
        want, got = plain.forward(batch), eager.forward(batch)
        torch.testing.assert_close(graphed.forward(batch), got, rtol=1e-5, atol=1e-5)
        assert float((got - want).norm() / want.norm()) < 0.1
    # The first layer's keys and values do not depend on the cache.
    for read, exact in zip(*((each._pools[0].keys, each._pools[0].values) for each in (eager, plain)), strict=True):
        torch.testing.assert_close(read.float(), exact.float(), rtol=1 / 16, atol=2**-9)


def adapter_of(model: Any, handle: int, name: str) -> Any:
    """A random adapter of one module of each layer."""
    from genbatch.nif.runner import LoraAdapter, LoraLinear

    random = np.random.default_rng(handle)
    linears = {}
    for layer in range(len(model.layers)):
        module = f"model.layers.{layer}.{name}"
        outputs, inputs = model.hf.get_submodule(module).weight.shape
        a, b = (
            random.standard_normal(shape).astype(np.float32) for shape in ((8 * handle, inputs), (outputs, 8 * handle))
        )
        linears[module] = LoraLinear(a, b, 0.05)
    return LoraAdapter(f"a{handle}", Path(), "", handle, linears)


def test_h14_replay_with_adapters_equals_eager(gpu_model: Any) -> None:
    """The second adapter needs other tables, so the graph is captured again."""
    from genbatch.nif.engine_options import GraphOptions

    model = gpu_model("llama")
    eager, graphed = runner_for(model), runner_for(model, graphs=GraphOptions(max_batch_size=16))
    plain = eager.forward(decode_batch(len(model.groups), 9, 3)).clone()
    for handle, name in ((1, "self_attn.q_proj"), (2, "mlp.down_proj")):
        adapter = adapter_of(model, handle, name)
        for runner in (eager, graphed):
            runner.add_adapter(adapter)
        for length in (3, 4, 5):
            batch = decode_batch(len(model.groups), 9, length)
            batch = dataclasses.replace(batch, adapters=np.arange(9) % (handle + 1))
            expected = eager.forward(batch)
            torch.testing.assert_close(graphed.forward(batch), expected, rtol=1e-5, atol=1e-5)
            if length == 3:
                # Rows without an adapter are the same but for rounding: another variant of the kernel computes them.
                changed = (expected - plain).abs().amax(1) > 1e-4 * plain.abs().amax(1)
                assert changed.tolist() == [row % (handle + 1) > 0 for row in range(9)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_h14_captured_steps_with_prompts_equal_eager_ones(gpu_model: Any, family: str) -> None:
    """Chunks beside decodes, of numbers of tokens on both sides of every size that is captured."""
    from genbatch.nif.context import Context
    from genbatch.nif.engine_options import GraphOptions
    from genbatch.nif.runner import Entry
    from genbatch.nif.runners.triton_runner import TritonRunner

    model = gpu_model(family)
    logits: list[list[torch.Tensor]] = []
    for graphs in (None, GraphOptions(max_batch_size=8, max_prompt_tokens=160)):
        runner = TritonRunner(model, graphs=graphs)
        context = Context(model, runner, n_ctx=4096, n_parallel=8, block_size=BLOCK_SIZE, n_batch=512)
        assert (runner._prompt_graphs is not None) == (graphs is not None)
        found = [context.prefill([7, 9, 11], 0, 0)]
        for step, length in enumerate((2, 62, 63, 64, 127, 128, 158, 159, 160, 200)):
            decodes = [Entry(0, (5 + step,), 3 + step)]
            chunk = Entry(1 + step % 7, tuple(3 + token % 50 for token in range(length)), 0)
            found += [part for part in context.eval([*decodes, chunk]) if part is not None]
            context.seq_rm(chunk.seq_id)
        logits.append([part.cpu() for part in found])
        context.kv.check_integrity()
        context.close()
    for expected, actual in zip(*logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_h14_no_more_graphs_are_kept_than_allowed(gpu_model: Any) -> None:
    from genbatch.nif.engine_options import GraphOptions

    model = gpu_model("llama")
    options = GraphOptions(max_batch_size=16, max_cached_graphs=2, kv_padding_interval_size=8)
    runner = runner_for(model, graphs=options)
    for length in (3, 11, 19, 27, 3):
        for num_tokens in (1, 16):
            runner.forward(decode_batch(1, num_tokens, length))
            assert len(runner._graphs.cache) == 2


@pytest.mark.parametrize("graphed", [True, False])
def test_a_step_never_waits_for_the_device(gpu_model: Any, graphed: bool) -> None:
    from genbatch.nif.engine_options import GraphOptions

    model = gpu_model("llama")
    runner = runner_for(model, graphs=GraphOptions(max_batch_size=8) if graphed else None)
    batch = decode_batch(1, 5, 3)
    runner.forward(batch)  # compiles
    with without_waiting():
        runner.forward(batch)


@pytest.mark.parametrize("tier", ["lean", "general"])
def test_both_tiers_equal_the_torch_runner_on_the_gpu(gpu_model: Any, tier: Any) -> None:
    from genbatch.nif.runners.torch_runner import TorchRunner

    model = gpu_model("qwen3")
    plain = TorchRunner(model)
    plain.allocate([64] * len(model.groups), BLOCK_SIZE)
    runner = runner_for(model, tier=tier)
    for length in range(1, 8):
        batch = decode_batch(len(model.groups), 4, length)
        torch.testing.assert_close(runner.forward(batch), plain.forward(batch), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("share", [64, 512])
def test_attention_in_bfloat16_equals_its_twin(share: int) -> None:
    from genbatch.nif.kernels.paged_attention import AttentionSetting, paged_attention, plan_shares
    from tests.nif.kernels import reference

    generator = torch.Generator().manual_seed(0)
    cache_shape = (40, 8, 16, 128)
    keys, values = (torch.randn(cache_shape, generator=generator).cuda().bfloat16() for _ in range(2))
    query = torch.randn((5, 16, 128), generator=generator).cuda().bfloat16()
    table = torch.randint(40, (5, 32), generator=generator, dtype=torch.int32).cuda()
    starts = torch.arange(6, dtype=torch.int32).cuda()
    kv_lens = torch.tensor([1, 17, 0, 300, 512], dtype=torch.int32).cuda()
    arguments = (query, keys, values, table, starts, kv_lens)
    expected = reference.paged_attention(*arguments, scale=0.09)
    plan = plan_shares(starts, kv_lens, AttentionSetting(num_processors=4, share=share), max_kv_len=512)
    actual = paged_attention(*arguments, plan, scale=0.09, max_query_len=1)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def draws_of(num_tokens: int, position: int) -> npt.NDArray[np.float64]:
    """Every second row draws, in all the ways there are."""
    from genbatch.nif.sampling.sampler import DrawTable, SamplingParams

    ways: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.02}]
    params = [
        SamplingParams(seed=row, temperature=1.2, **ways[row // 2 % 3]) if row % 2 else SamplingParams(seed=row)
        for row in range(num_tokens)
    ]
    return DrawTable(params).at([position] * num_tokens)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_h14_a_replay_draws_what_an_eager_step_draws(gpu_model: Any, family: str) -> None:
    """Each step takes its input from the one before, on the device, and is launched before that one is read."""
    from genbatch.nif.engine_options import GraphOptions

    model = gpu_model(family)
    options = GraphOptions(max_batch_size=16, kv_padding_interval_size=8)  # some are captured in the middle of a run
    drawn: list[list[list[int | None]]] = []
    for runner in (runner_for(model), runner_for(model, graphs=options)):
        for num_tokens in (1, 5, 9):
            launched = []
            for length in range(1, 20):
                after = launched[-1] if launched else None
                batch, draws = decode_batch(len(model.groups), num_tokens, length), draws_of(num_tokens, length)
                launched.append(runner.launch(batch, draws, after))
                if after is not None:
                    drawn.append([after.wait()])
            drawn.append([launched[-1].wait()])
    half = len(drawn) // 2
    assert drawn[:half] == drawn[half:]
    assert len({str(tokens) for tokens in drawn}) > 3


@pytest.mark.parametrize("graphed", [True, False])
def test_h15_a_launch_never_waits_for_the_device(gpu_model: Any, graphed: bool) -> None:
    from genbatch.nif.engine_options import GraphOptions

    runner = runner_for(gpu_model("llama"), graphs=GraphOptions(max_batch_size=8) if graphed else None)
    for _ in range(2):  # both pairs of buffers get their size, and kernels compile
        runner.launch(decode_batch(1, 5, 3), draws_of(5, 3), None).wait()
    with without_waiting():
        first = runner.launch(decode_batch(1, 5, 3), draws_of(5, 3), None)
        second = runner.launch(decode_batch(1, 5, 4), draws_of(5, 4), first)
    assert len(first.wait()) == len(second.wait()) == 5


def test_h15_a_step_is_under_way_when_the_one_before_is_read(gpu_model: Any) -> None:
    runner = runner_for(gpu_model("llama"))
    runner.launch(decode_batch(1, 5, 3), draws_of(5, 3), None).wait()
    torch.cuda._sleep(50_000_000)  # cycles, some 30 ms: both launches return long before
    first = runner.launch(decode_batch(1, 5, 3), draws_of(5, 3), None)
    second = runner.launch(decode_batch(1, 5, 4), draws_of(5, 4), first)
    assert not first._arrived.query()
    assert len(first.wait()) == len(second.wait()) == 5


@pytest.mark.parametrize("graphed", [True, False])
def test_h15_steps_that_are_held_up_are_not_written_over(gpu_model: Any, graphed: bool) -> None:
    """Each step waits on the device while the next one's input is copied in, in buffers that grow with the tables."""
    from genbatch.nif.engine_options import GraphOptions

    model = gpu_model("llama")
    drawn: list[list[list[int | None]]] = []
    for cycles in (0, 5_000_000):
        runner = runner_for(model, graphs=GraphOptions(max_batch_size=8) if graphed else None)
        launched = None
        tokens = []
        for length in range(1, 30):
            torch.cuda._sleep(cycles)
            step = runner.launch(decode_batch(1, 1 + length % 2, length), draws_of(1 + length % 2, length), None)
            if launched is not None:
                tokens.append(launched.wait())
            launched = step
        tokens.append(launched.wait())
        drawn.append(tokens)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("graphed", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_h15_a_run_whose_steps_overlap_draws_what_single_steps_draw(gpu_model: Any, family: str, graphed: bool) -> None:
    from genbatch.nif.context import Context
    from genbatch.nif.context.overlapped_run import OverlappedRun
    from genbatch.nif.engine_options import GraphOptions
    from genbatch.nif.runner import Entry
    from genbatch.nif.runners.triton_runner import TritonRunner
    from genbatch.nif.sampling.sampler import SamplerState, SamplingParams

    model = gpu_model(family)
    params = [SamplingParams(seed=seed, temperature=0.8 * (seed % 2), top_p=0.95) for seed in range(6)]
    texts = []
    for overlaps in (True, False):
        graphs = GraphOptions(max_batch_size=8) if graphed else None
        context = Context(model, TritonRunner(model, graphs=graphs), n_ctx=2048, n_parallel=6, block_size=BLOCK_SIZE)
        entries = []
        for seq_id in range(6):
            context.prefill([seq_id + 3] * (5 + seq_id), seq_id, 0)
            entries.append(Entry(seq_id, [7], 5 + seq_id))
        states = [SamplerState(one, ()) for one in params]
        drawn: list[Any] = []
        if overlaps:
            run = context.decode_run(entries, states, max_steps=60)
            assert isinstance(run, OverlappedRun)
            drawn = [run.step() for _ in range(60)]
            run.close()
        else:
            for _ in range(60):
                drawn.append(context.step(entries, states, with_logits=False)[1])
                entries = [
                    Entry(e.seq_id, [draw.token_id], e.n_past + 1) for e, draw in zip(entries, drawn[-1], strict=True)
                ]
        texts.append(drawn)
        context.kv.check_integrity()
        context.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("graphed", [True, False])
def test_h15_a_run_draws_the_same_without_the_rows_that_leave(gpu_model: Any, graphed: bool) -> None:
    """The rows behind a row that leaves move up: their input is what another row has drawn."""
    from genbatch.nif.context import Context
    from genbatch.nif.engine_options import GraphOptions
    from genbatch.nif.runner import Entry
    from genbatch.nif.runners.triton_runner import TritonRunner
    from genbatch.nif.sampling.sampler import SamplerState, SamplingParams

    model = gpu_model("llama")
    most = [40, 1, 17, 40, 5, 40]
    texts = []
    for num_draws in (most, None):
        # One size, so that the products are the same with fewer rows.
        graphs = GraphOptions(q_padding_interval_size=8, max_batch_size=8) if graphed else None
        context = Context(model, TritonRunner(model, graphs=graphs), n_ctx=2048, n_parallel=6, block_size=BLOCK_SIZE)
        entries = []
        for seq_id in range(6):
            context.prefill([seq_id + 3] * (5 + seq_id), seq_id, 0)
            entries.append(Entry(seq_id, [7], 5 + seq_id))
        states = [SamplerState(SamplingParams(seed=seed, temperature=0.8 * (seed % 2)), ()) for seed in range(6)]
        run = context.decode_run(entries, states, max_steps=40, num_draws=num_draws)
        drawn: list[list[Any]] = [[] for _ in range(6)]
        for step in range(40):
            if num_draws is not None and step == 25:
                run.rows.leave(3)
            for tokens, draw in zip(drawn, run.step(), strict=True):
                if draw is not None:
                    tokens.append(draw)
        run.close()
        texts.append(drawn)
        context.kv.check_integrity()
        context.close()
    assert [len(tokens) for tokens in texts[0]] == [40, 1, 17, 26, 5, 40]
    assert texts[0] == [tokens[: len(left)] for tokens, left in zip(texts[1], texts[0], strict=True)]


@pytest.mark.parametrize("graphed", [True, False])
def test_h15_async_batching_changes_no_text_on_the_gpu(gpu_model: Any, graphed: bool) -> None:
    trio = pytest.importorskip("trio")
    pytest.importorskip("msgspec")

    from genbatch.actors.batcher.batcher import Batcher
    from genbatch.actors.batcher.messages import Generate
    from genbatch.actors.batcher.options import BatcherOptions
    from genbatch.actors.runtime.actor import start
    from genbatch.nif.context import Context
    from genbatch.nif.engine_options import GraphOptions
    from genbatch.nif.runners.triton_runner import TritonRunner
    from genbatch.proto.messages import GenerateRequest

    model = gpu_model("llama")
    requests = [
        GenerateRequest(
            token_ids=[5 + index] * (3 + index), max_tokens=10 + 5 * index, temperature=0.9 * (index % 2), seed=index
        )
        for index in range(8)
    ]

    async def answers(async_batching: bool) -> list[Any]:
        found: dict[int, Any] = {}

        async def ask(ref: Any, index: int) -> None:
            found[index] = await ref.call(Generate(requests[index]), timeout=None)

        def context() -> Context:
            graphs = GraphOptions(max_batch_size=8) if graphed else None
            runner = TritonRunner(model, graphs=graphs)
            return Context(model, runner, n_ctx=512, n_parallel=4, n_held=4, block_size=BLOCK_SIZE)

        async with trio.open_nursery() as nursery:
            actor = Batcher(context, BatcherOptions(n_parallel=4, async_batching=async_batching))
            ref = await start(nursery, actor, name="batcher")
            async with trio.open_nursery() as callers:
                for index in range(len(requests)):
                    callers.start_soon(ask, ref, index)
            actor.ctx.kv.check_integrity()
            await ref.stop()
        return [(found[index].token_ids, found[index].finish_reason) for index in range(len(requests))]

    assert trio.run(answers, True) == trio.run(answers, False)


def test_h16_blocks_read_from_a_gpu_are_pinned_and_arrive_later(gpu_model: Any) -> None:
    runner = runner_for(gpu_model("llama"))
    runner.forward(decode_batch(1, 4, 3))
    before = runner.read_blocks(0, [0, 2])
    runner.finish_copies()
    kept = before.clone()
    assert before.is_pinned()
    assert kept.ne(0).any()
    content = runner.read_blocks(0, [0, 2])
    runner.write_blocks(0, [9, 11], content)  # which has not arrived yet
    runner.forward(decode_batch(1, 4, 4))  # writes over what was read
    after = runner.read_blocks(0, [9, 11, 0])
    runner.finish_copies()
    assert content.equal(kept)
    assert after[:2].equal(kept)
    assert not after[2].equal(kept[0])


def test_h16_copies_of_blocks_never_wait_for_the_device(gpu_model: Any) -> None:
    runner = runner_for(gpu_model("llama"))
    runner.write_blocks(0, [5, 6], runner.read_blocks(0, [3, 4]))  # its memory is allocated
    runner.finish_copies()
    torch.cuda._sleep(50_000_000)
    with without_waiting():
        content = runner.read_blocks(0, [3, 4])
        runner.write_blocks(0, [5, 6], content)
    assert not torch.cuda.current_stream().query(), "the copies were waited for"
    runner.finish_copies()
