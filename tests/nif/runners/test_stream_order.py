"""The runners' own code over a GPU that knows who waits for whom: no two uses of the same memory without an order."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from genbatch.nif.context import Context
from genbatch.nif.context.overlapped_run import OverlappedRun
from genbatch.nif.engine_options import GraphOptions
from genbatch.nif.kernels.elementwise import copy_blocks
from genbatch.nif.runner import Content, Entry, Logits, LoraAdapter, LoraLinear
from genbatch.nif.runners.block_transfer import SideStream
from genbatch.nif.runners.triton_runner import TritonRunner
from genbatch.nif.sampling.device_draws import sample_on_device as sample
from genbatch.nif.sampling.sampler import SamplerState, SamplingParams
from tests.benchmarks.launch_model import Card, decode_step, predict
from tests.nif.runners.fake_gpu import CUDA, FakeGpu, Race, WaitsForDevice, WrongDevice

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=320,
    max_position_embeddings=512,
)
BLOCK_SIZE = 4


def begun(gpu: FakeGpu, rows: int, **options: Any) -> tuple[Context, list[Entry], list[SamplerState]]:
    model = gpu.model(CONFIG)
    context = Context(
        model, TritonRunner(model, **options), n_ctx=1024, n_parallel=rows, block_size=BLOCK_SIZE, n_batch=64
    )
    entries = []
    for seq_id in range(rows):
        context.eval([Entry(seq_id, [5] * (3 + seq_id), 0, Logits.LAST)])
        entries.append(Entry(seq_id, [7], 3 + seq_id))
    return context, entries, [SamplerState(SamplingParams(seed=0), ())] * rows


def decode(context: Context, entries: Sequence[Entry], states: Sequence[SamplerState], steps: int) -> None:
    run = context.decode_run(entries, states, max_steps=steps)
    assert isinstance(run, OverlappedRun)
    for _ in range(steps - 1):
        run.step()
    run.close()  # with a step under way


def adapter_of(handle: int, module: str, rank: int = 8) -> LoraAdapter:
    """An adapter of one module of each layer."""
    sizes = {"self_attn.q_proj": (32, 32), "mlp.down_proj": (64, 32)}
    inputs, outputs = sizes[module]
    linear = LoraLinear(np.zeros((rank, inputs), np.float32), np.zeros((outputs, rank), np.float32), 1.0)
    linears = {f"model.layers.{layer}.{module}": linear for layer in range(CONFIG.num_hidden_layers)}
    return LoraAdapter(f"a{handle}", Path(), "", handle, linears)


GRAPHS = [
    pytest.param(None, id="eager"),
    pytest.param(GraphOptions(max_batch_size=4, max_prompt_tokens=64), id="graphs"),
    pytest.param(
        GraphOptions(max_batch_size=4, kv_padding_interval_size=8, max_cached_graphs=2), id="captured in flight"
    ),
]


@pytest.mark.parametrize("graphs", GRAPHS)
def test_h15_overlapped_steps_whose_tables_grow_are_ordered(graphs: GraphOptions | None) -> None:
    gpu = FakeGpu()
    with gpu.active():
        context, entries, states = begun(gpu, 2, graphs=graphs)
        decode(context, entries, states, 150)  # tables of 1 block, and in the end of 39: every buffer grows
        decode(context, [Entry(e.seq_id, e.tokens, context.kv.length(e.seq_id)) for e in entries], states, 5)
        context.close()
    replayed = any(operation.name.startswith("replayed") for operation in gpu.operations)
    assert replayed == (graphs is not None)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_steps_whose_rows_leave_are_ordered(graphs: GraphOptions | None) -> None:
    """Another sequence takes the freed blocks while the step that read them last may be under way."""
    gpu = FakeGpu()
    with gpu.active():
        context, entries, states = begun(gpu, 4, graphs=graphs)
        run = context.decode_run(entries, states, max_steps=40, num_draws=[40, 5, 40, 9])
        for step in range(40):
            if step == 20:
                run.rows.leave(0)
            run.step()
        assert run.is_over
        run.close()
        context.eval([Entry(1, [5] * 30, 0, Logits.NONE)])
        context.close()


def test_h14_steps_with_adapters_have_graphs_until_other_tables_take_their_place() -> None:
    gpu = FakeGpu()
    with gpu.active():
        context, entries, states = begun(gpu, 3, graphs=GraphOptions(max_batch_size=4, max_prompt_tokens=64))

        def replays(*handles: int) -> tuple[bool, int]:
            """Decode with these adapters; returns whether their kernels were replayed, and how many were launched."""
            before = len(gpu.operations)
            named = [
                dataclasses.replace(entry, adapter=handle, n_past=context.kv.length(entry.seq_id))
                for entry, handle in zip(entries, handles, strict=True)
            ]
            decode(context, named, states, 4)
            names = [operation.name for operation in gpu.operations[before:]]
            return any(name == "replayed _expand_kernel" for name in names), names.count("_expand_kernel")

        assert replays(0, 0, 0) == (False, 0)
        for handle, module in enumerate(("self_attn.q_proj", "self_attn.q_proj", "mlp.down_proj"), 1):
            adapter = adapter_of(handle, module)
            context.prepare_adapter(adapter)
            context.add_adapter(adapter)
            replayed, launched = replays(0, 1, handle)
            assert replayed
            assert bool(launched) == (handle != 2), "the second adapter needs no other graph"
        context.close()


@pytest.mark.parametrize("graphs", GRAPHS[:2])
def test_h16_blocks_swapped_beside_running_steps_are_ordered(graphs: GraphOptions | None) -> None:
    gpu = FakeGpu()
    with gpu.active():
        context, entries, states = begun(gpu, 3, graphs=graphs)
        run = context.decode_run(entries[:2], states[:2], max_steps=30)
        kept: list[Content] = []
        for step in range(20):
            run.step()
            blocks = list(context.kv.block_table(0, 2))
            if step % 3 == 1:
                kept.append(context.runner.read_blocks(0, blocks))
            if step % 3 == 2:
                context.runner.write_blocks(0, blocks, kept.pop())  # which may not have arrived yet
        run.close()
        context.runner.finish_copies()  # type: ignore[attr-defined]
        context.close()


def test_h16_a_step_that_writes_over_what_leaves_is_ordered() -> None:
    """The blocks that are read go to whoever decodes next, whose step is launched at once."""
    gpu = FakeGpu()
    with gpu.active():
        context, _, states = begun(gpu, 2)
        contents = []
        for _ in range(4):
            blocks = list(context.kv.block_table(0, 0))
            contents.append(context.runner.read_blocks(0, blocks))
            decode(context, [Entry(0, [7], context.kv.length(0))], states[:1], 4)
            context.runner.write_blocks(0, blocks, contents[-1])
            context.runner.copy_blocks(0, [(blocks[0], 200)])
            decode(context, [Entry(0, [7], context.kv.length(0))], states[:1], 4)
        context.close()


@pytest.mark.parametrize("graphs", GRAPHS[:2])
def test_chunks_of_a_prompt_that_nobody_waits_for_are_ordered(graphs: GraphOptions | None) -> None:
    gpu = FakeGpu()
    with gpu.active():
        context, _, _ = begun(gpu, 1, graphs=graphs)
        for start in range(3, 200, 20):
            context.eval([Entry(0, [5] * 20, start, Logits.NONE)])
        context.close()


def test_a_launch_does_not_wait_for_the_device() -> None:
    """The host's clock moves with the tokens that it reads, and with nothing else."""
    gpu = FakeGpu()
    with gpu.active():
        context, entries, states = begun(gpu, 2)
        run = context.decode_run(entries, states, max_steps=9)
        for _ in range(4):
            run.step()
            newest = gpu.default.clock[gpu.default.number]
            assert gpu.host.get(gpu.default.number, 0) < newest, "the step ahead was waited for"
        run.close()


@pytest.mark.parametrize("graphs", GRAPHS[:2])
def test_rows_that_depend_on_the_output_are_drawn_in_order_and_without_waiting(graphs: GraphOptions | None) -> None:
    gpu = FakeGpu()
    with gpu.active():
        context, entries, states = begun(gpu, 3, graphs=graphs)
        states = [
            states[0],
            SamplerState(SamplingParams(seed=0, repetition_penalty=1.5, logit_bias={3: 1.0}), [1, 2]),
            SamplerState(SamplingParams(seed=0, logprobs=2), ()),
        ]
        run = context.decode_run(entries, states, max_steps=9)
        for _ in range(4):
            run.step()
            newest = gpu.default.clock[gpu.default.number]
            assert gpu.host.get(gpu.default.number, 0) < newest, "the step ahead was waited for"
        run.close()
        context.close()
    assert "_edit_kernel" in {operation.name for operation in gpu.operations}


def test_a_chunk_of_a_prompt_that_draws_nothing_is_not_waited_for() -> None:
    gpu = FakeGpu()
    with gpu.active():
        context, _, _ = begun(gpu, 1)
        for start in range(3, 83, 20):
            context.eval([Entry(0, [5] * 20, start, Logits.NONE)])
        assert gpu.host.get(gpu.default.number, 0) < gpu.default.clock[gpu.default.number]
        context.close()


def test_h14_all_sizes_are_captured_on_one_stream() -> None:
    """cuBLAS keeps a workspace for each stream, and no budget has room for one per graph."""
    made = []
    for sizes in (4, 64):
        gpu = FakeGpu()
        with gpu.active():
            context, _, _ = begun(gpu, 2, graphs=GraphOptions(max_batch_size=sizes))
            context.close()
        made.append(gpu.num_streams)
    assert made[0] == made[1]


def test_rows_are_sampled_on_the_device_of_their_logits() -> None:
    gpu = FakeGpu()
    with gpu.active():
        params = SamplingParams(seed=0, repetition_penalty=1.5, logprobs=2)
        [drawn] = sample(gpu.on_gpu((1, 320), torch.float32), [SamplerState(params, [1, 2])], [3])
        assert gpu.host[gpu.default.number] == gpu.default.clock[gpu.default.number], "it reads what has arrived"
    assert drawn.failed  # nothing has content here, so no row is finite
    assert {"_edit_kernel", "_sample_kernel"} <= {operation.name for operation in gpu.operations}


# What the checker itself finds.


def test_a_kernel_beside_the_current_device_is_found() -> None:
    gpu = FakeGpu()
    with gpu.active(), pytest.raises(WrongDevice, match=r"cuda:0, which is current, and not to cuda:1"):
        copy_blocks(gpu.on_gpu((4, 8), torch.float16), torch.zeros((1, 2), dtype=torch.int64, device=CUDA))


def test_memory_of_a_running_step_is_not_to_be_written_on_another_stream() -> None:
    gpu = FakeGpu()
    with gpu.active():
        side = SideStream(CUDA)
        temporary = torch.zeros(64, device=CUDA)
        _ = temporary + 1
        del temporary, _
        buffer = torch.empty(64, device=CUDA)  # the same memory: in its own stream all of that is over by then
        buffer += 1
        with side.open(), pytest.raises(Race, match="not ordered after"):
            buffer.copy_(torch.zeros(64, pin_memory=True), non_blocking=True)


def test_what_events_order_is_no_race() -> None:
    gpu = FakeGpu()
    with gpu.active():
        side = SideStream(CUDA)
        there = torch.zeros(64, device=CUDA)
        side.wait_for_compute()
        with side.open():
            there += 1
        side.hold_up_compute()
        there += 1
        host = torch.zeros(64, pin_memory=True)
        host.copy_(there, non_blocking=True)
        with pytest.raises(Race, match="tolist"):
            host.tolist()
        torch.cuda.current_stream().synchronize()
        host.tolist()


def test_a_number_of_a_tensor_on_the_gpu_is_waited_for_and_found() -> None:
    gpu = FakeGpu()
    with gpu.active(), pytest.raises(WaitsForDevice):
        torch.zeros(3, device=CUDA).tolist()


def test_h14_a_captured_step_of_28_layers_is_less_than_200_launches_and_reads_each_weight_once() -> None:
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 28, "vocab_size": 4096, "hidden_size": 256})
    operations = decode_step(config, rows=1, context=512)
    assert 28 * 6 < len(operations) < 200
    one = predict(operations, 1, 512, Card())
    weights = 2 * (28 * 256 * ((4 + 2 * 2 + 4) * 8 + 3 * 64) + 4096 * 256)
    held = 2 * 28 * 2 * 512 * 2 * 8
    assert weights + held < one.nbytes < 1.5 * (weights + held)
    assert one.total == len(operations)
    assert one.graph_s < one.eager_s


def test_h14_no_kernel_is_compiled_once_a_service_is_ready() -> None:
    root = Path(__file__).resolve().parents[3]
    ways = ("graphs:none", "eager:none", "graphs:int4", "eager:int8")  # one after another: a start takes 4 s
    done = subprocess.run(  # in this process Triton interprets
        [sys.executable, "-m", "tests.nif.runners.late_variants", *ways],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / ".ns")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == ""
