"""The engine: which runner a model gets, how large its KV pool is, and which options are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genbatch.nif.context.engine import Engine, load_engine, read_template
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.native.runner import NativeRunner
from genbatch.nif.runners.torch_runner import TorchRunner

TinyModel = Callable[[str], Model]


def context(model: Model, **options: Any) -> Any:
    return Engine(model, EngineOptions(**options)).open_context(n_parallel=4, n_held=1, n_batch=32)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("runner", "cuda"),
        ("runner", "triton"),
        ("quantize", "int3"),
        ("kv_cache_dtype", "int4"),
        ("n_ctx", -1),
        ("block_size", 0),
        ("n_threads", -1),
        ("num_blocks", 0),
        ("max_memory_percent", 0.0),
        ("max_memory_percent", 1.5),
        ("max_cached_graphs", 0),
    ],
)
def test_an_option_that_cannot_be_honoured_is_named(tiny_model: TinyModel, option: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        context(tiny_model("llama"), **{option: value})
    assert caught.value.option == option


def test_a_template_from_windows_has_no_byte_order_mark_in_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "template"
    file.write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}")
    assert read_template(str(file)) == "{{ messages[0].content }}"


def test_h14_graphs_on_a_cpu_are_refused_with_the_reason(tiny_model: TinyModel) -> None:
    with pytest.raises(OptionError, match=r"use_cuda_graph.*GPU.*cpu"):
        context(tiny_model("llama"), use_cuda_graph=True)


def test_a_model_that_c_cannot_run_gets_torch_and_insisting_is_refused(tiny_model: TinyModel) -> None:
    assert isinstance(context(tiny_model("gemma3")).runner, TorchRunner)
    with pytest.raises(OptionError, match="native"):
        context(tiny_model("gemma3"), runner="native")
    with pytest.raises(OptionError, match="quantize"):
        context(tiny_model("gemma3"), quantize="int8")
    with pytest.raises(OptionError, match="quantize"):
        context(tiny_model("llama"), runner="torch", quantize="int8")


def test_fp8_is_for_a_gpu_and_the_error_says_what_a_cpu_has(tiny_model: TinyModel) -> None:
    with pytest.raises(OptionError, match=r"fp8 is for the triton runner on a GPU; a CPU has int8 and int4"):
        context(tiny_model("llama"), quantize="fp8")


def test_the_default_model_runs_in_c_where_a_compiler_is(smollm2: Model) -> None:
    assert isinstance(context(smollm2, runner="native").runner, NativeRunner)
    assert isinstance(context(smollm2, runner="torch").runner, TorchRunner)


@pytest.mark.parametrize(
    ("dtype", "quantize", "taken"),
    [
        ("auto", "auto", "int8"),
        ("float32", "auto", "none"),
        ("bfloat16", "auto", "none"),
        ("auto", "none", "none"),
        ("float32", "int8", "int8"),
    ],
)
def test_quantize_auto_is_int8_unless_a_dtype_was_named(smollm2: Model, dtype: str, quantize: str, taken: str) -> None:
    chosen = context(smollm2, runner="native", dtype=dtype, quantize=quantize)
    assert chosen.runner.quantize == taken
    assert ("int8" in chosen.runner.name) == (taken == "int8")
    chosen.close()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, 4.0),
        ({"quantize": "int8"}, 1.094),
        ({"kv_cache_dtype": "int8"}, 1.094),  # with three factors of 4 bytes for 64 + 64 numbers
        ({"kv_cache_dtype": "bfloat16"}, 2.0),
        ({"kv_cache_dtype": "float32", "quantize": "int8"}, 4.0),
    ],
)
def test_keys_and_values_have_numbers_of_their_own(smollm2: Model, options: dict[str, str], kept: float) -> None:
    """And the pool of the same memory has as many more positions."""
    chosen = context(smollm2, runner="native", dtype="float32", **options)
    shape = smollm2.layers[0]
    numbers = len(smollm2.layers) * shape.num_kv_heads * (shape.key_dim + shape.value_dim)
    assert chosen.runner.bytes_per_block(0, 16) / (16 * numbers) == pytest.approx(kept, rel=0.01)
    chosen.close()


@pytest.mark.parametrize("options", [{"runner": "torch"}, {"pooling": "mean"}, {"tensor_parallel": 2}])
def test_only_the_native_runner_has_keys_and_values_in_other_numbers(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="kv_cache_dtype: int8 is not possible"):
        load_engine(EngineOptions(model_path="smollm2", n_gpu_layers=0, kv_cache_dtype="int8", **options))


def test_a_cache_in_fp8_is_refused_on_a_cpu() -> None:
    with pytest.raises(OptionError, match="kv_cache_dtype: float8 is for the triton runner on a GPU; a CPU has int8"):
        load_engine(EngineOptions(model_path="smollm2", n_gpu_layers=0, kv_cache_dtype="float8"))


def test_quantize_auto_is_none_where_the_kernels_do_not_run(tiny_model: TinyModel, smollm2: Model) -> None:
    assert context(tiny_model("gemma3")).runner.quantize == "none"
    assert context(smollm2, runner="torch").runner.quantize == "none"


def test_h08_pins_are_honoured_and_the_smallest_wins(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    assert context(model, n_ctx=100, block_size=16).kv.num_blocks == (7,)
    assert context(model, num_blocks=5).kv.num_blocks == (5,)
    assert context(model, n_ctx=8192, max_tokens_in_cache=64, block_size=16).kv.num_blocks == (4,)


@pytest.mark.parametrize("n_ctx", [None, 0])
def test_h08_without_n_ctx_the_pool_takes_its_share_of_the_free_memory(
    n_ctx: int | None, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    sizes = []
    for free in (64 << 20, 128 << 20):
        monkeypatch.setattr("genbatch.nif.context.engine.free_host_memory", lambda free=free: free)
        opened = context(model, n_ctx=n_ctx, max_memory_percent=0.5)
        pool = opened.kv.num_blocks[0] * opened.runner.bytes_per_block(0, opened.kv.block_size)
        assert 0.2 * free < pool < 0.5 * free
        assert opened.max_positions == model.max_position < opened.n_ctx  # a sequence takes what the model allows
        sizes.append(pool)
    assert sizes[1] > 1.8 * sizes[0]
    assert "is limited by" not in caplog.text, "by memory, as was asked"
    context(model, n_ctx=n_ctx, max_tokens_in_cache=64)
    assert "is limited by max_tokens" in caplog.text


def test_a09_the_cap_is_n_ctx_over_n_parallel(tiny_model: TinyModel) -> None:
    assert context(tiny_model("llama"), n_ctx=128, cap_per_sequence=True).max_positions == 32
    assert context(tiny_model("llama"), n_ctx=128).max_positions == 128


def test_a_window_takes_fewer_blocks_and_no_positions_away(tiny_model: TinyModel) -> None:
    """Every layer of this model looks back 8 positions: two sequences need a few blocks of the 64."""
    options = EngineOptions(n_ctx=256, block_size=4, runner="torch")
    context = Engine(tiny_model("mistral"), options).open_context(n_parallel=2, n_held=0, n_batch=16)
    try:
        assert context.n_ctx == context.max_positions == 256
        tokens = [token % 300 + 3 for token in range(200)]  # more than the blocks hold at once
        context.prefill(tokens, seq_id=0, n_past=0)
        assert len(context.decode_batch([(0, 5, 200)])) == 1
    finally:
        context.close()
