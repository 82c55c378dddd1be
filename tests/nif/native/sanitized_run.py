"""Runs small models of every mode through kernels built with the sanitizers; a program, started by test_build.py.

By hand: LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0 python tests/nif/native/sanitized_run.py address,undefined
    LD_PRELOAD="$(gcc -print-file-name=libtsan.so)" setarch -R python tests/nif/native/sanitized_run.py thread
"""

import importlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from genbatch.nif.cuda_device import CPU
from genbatch.nif.models.architectures import layer_groups
from genbatch.nif.models.assistants import describe_assistant
from genbatch.nif.models.model import describe_model
from genbatch.nif.models.model_source import resolve_model
from genbatch.nif.native import model_weights
from genbatch.nif.native.build import build_library, native_flags
from genbatch.nif.native.library import STORED, open_library
from genbatch.nif.native.runner import NativeRunner
from genbatch.nif.runner import LayerGroup, RaggedBatch

# -g1: a report names the line; what variables held it cannot say, and that took a third of the build.
FLAGS = (*native_flags(), "-O1", "-g1", "-fno-sanitize-recover=all")
BLOCK_SIZE = 5  # neither a multiple of 16 nor even
BLOCKS = 14


def batch(start: int, stop: int, shared: int = 0, groups: int = 1) -> RaggedBatch:
    """Two sequences, the second in the pool's last blocks, up to its last position; `shared` first blocks in common."""
    tokens = np.arange(start, stop)
    table = np.arange(2 * BLOCKS, dtype=np.int32).reshape(2, BLOCKS)
    table[1, :shared] = table[0, :shared]
    slots = np.concatenate([tokens, tokens + BLOCKS * BLOCK_SIZE])
    size = stop - start
    return RaggedBatch(
        input_ids=np.concatenate([tokens, tokens + 200]),
        positions=np.concatenate([tokens, tokens]),
        query_starts=np.array([0, size, 2 * size], np.int32),
        kv_lens=np.array([stop, stop], np.int32),
        slots=(slots,) * groups,
        block_tables=(table,) * groups,
        logit_rows=np.arange(2 * size),
        max_query_len=size,
        max_kv_len=stop,
    )


def run(runner: NativeRunner) -> None:
    """Prefill, a decode step, the rest of the pool, and a decode step over blocks in common."""
    groups = len(runner.groups)
    runner.allocate([2 * BLOCKS] * groups, BLOCK_SIZE)
    for start, stop, shared in ((0, 33, 0), (33, 34, 0), (34, 69, 0), (69, BLOCKS * BLOCK_SIZE, 9)):
        logits, largest = runner.forward_largest(batch(start, stop, shared, groups), with_logits=True)
        assert logits is not None and (logits.argmax(1) == largest.token_ids).all()
        assert np.isfinite(logits).all()
    runner.close()


def module_of(name: str) -> ModuleType:
    """Import a module beside this one. Its tests, if it has any, are called without pytest on the sanitized kernels."""
    sys.path.insert(0, str(Path(__file__).parents[3]))
    return importlib.import_module(f"tests.nif.native.{name}")


def run_stored() -> None:
    """Every type of a GGUF file and every group of a checkpoint, in each form of rows."""
    tests = module_of("test_stored")
    tests.native_library = model_weights.native_library
    for kind in STORED:
        tests.test_a_product_is_right_and_depends_on_its_row_only(kind)
        if kind in tests.BLOCKS:
            tests.test_integers_of_24_bits_come_nearer_to_the_true_sum_than_float_sums(kind)
        if kind in tests.BLOCKS and kind != "Q4_1":
            for group in (16, 32):
                tests.test_an_int8_product_is_that_of_the_rounded_row_and_depends_on_it_only(kind, group)
    tests.test_a_merged_linear_may_hold_several_types_and_sizes_that_fill_no_block()
    tests.test_gates_and_ups_alternate_and_rows_come_in_their_order()


def run_adapters() -> None:
    """Adapters on float and on 8-bit weights, experts beside them."""
    tests = module_of("test_lora")
    for name in ("gemma2", "qwen3_moe"):
        with tempfile.TemporaryDirectory() as folder:
            tests.test_logits_are_pefts_whatever_is_merged(name, Path(folder))


def run_predictions(quantize: str) -> None:
    """The layer of multi-token prediction, with logits of some rows, of all rows, and of none."""
    module_of("models")
    with tempfile.TemporaryDirectory() as folder:
        importlib.import_module("tests.nif.mtp_models").random_pair("qwen3_5", Path(folder))
        model = describe_model(folder)
        assert model is not None
        runner = NativeRunner(model_weights.ModelWeights(model, quantize, mtp=True), n_threads=2)
        groups = len(runner.groups)
        runner.allocate([2 * BLOCKS] * groups, BLOCK_SIZE)
        for start, stop in ((0, 33), (33, 34), (34, BLOCKS * BLOCK_SIZE)):
            step = batch(start, stop, 0, groups)
            for rows in (step.logit_rows[::5], step.logit_rows[:0], step.logit_rows):
                every = np.arange(step.input_ids.size)
                _, _, states = runner.forward_states(replace(step, logit_rows=rows), every, with_logits=True)
                logits, _, states_out = runner.predict(replace(step, logit_rows=rows), states, with_logits=True)
                assert logits is not None and np.isfinite(logits).all() and len(states_out) == len(rows)
        runner.close()


def run_assistants(quantize: str) -> None:
    """An assistant with clusters, over keys that begin, and over keys that fill the pool."""
    models = importlib.import_module("tests.nif.assistant_models")
    with tempfile.TemporaryDirectory() as folder:
        pair = models.random_pair("gemma4", Path(folder), **models.CLUSTERS)
        model = describe_model(str(pair.path))
        assert model is not None
        weights = model_weights.ModelWeights(model, quantize)
        assistant = describe_assistant("assistant", resolve_model(str(pair.draft)), model)
        weights.add_assistant(model_weights.ModelWeights(assistant, quantize))
        runner = NativeRunner(weights, n_threads=2)
        groups = len(runner.groups)
        runner.allocate([2 * BLOCKS] * groups, BLOCK_SIZE)
        for start, stop in ((0, 1), (1, 34), (34, BLOCKS * BLOCK_SIZE)):
            step = batch(start, stop, 0, groups)
            rows = np.array([stop - start - 1, 2 * (stop - start) - 1])
            _, _, states = runner.forward_states(replace(step, logit_rows=rows), rows, with_logits=True)
            two = replace(
                step,
                input_ids=np.array([5, 300]),
                positions=step.kv_lens.astype(np.int64),
                query_starts=np.arange(3, dtype=np.int32),
                slots=(np.zeros(2, np.int64),) * groups,
                logit_rows=np.arange(2),
                max_query_len=1,
            )
            logits, largest, after = runner.predict(two, states, with_logits=True)
            assert logits is not None and np.isfinite(logits).all() and np.isfinite(after).all()
            assert (logits.argmax(1) == largest.token_ids).all()
        runner.close()


def main(sanitizers: str) -> None:
    """Prints each mode that came through."""
    models = module_of("models")
    library = open_library(build_library((*FLAGS, f"-fsanitize={sanitizers}")))
    model_weights.native_library = lambda: library
    threads_matter = sanitizers == "thread"
    for mode in ("float32",) if threads_matter else ("float32", "bfloat16", "int8", "int4"):
        # One thread makes a family of both sequences; two are too many for so few.
        for name, window, n_threads in (
            ("llama_odd", None, 2),
            ("mistral", models.WINDOW, 2),
            ("llama", None, 1),
            ("gemma2", None, 1),
            ("gpt_oss", models.WINDOW, 2),
            ("stablelm", None, 2),
            ("qwen3_5", None, 2),
            ("gemma3n", None, 2),
        ):
            if threads_matter and n_threads == 1:
                continue
            model_class, make_config = models.CONFIGS[name]
            config = make_config()
            groups = (LayerGroup(tuple(range(config.num_hidden_layers)), window),)
            if name in ("qwen3_5", "gemma3n"):
                groups = layer_groups(name, config)
            dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
            model = SimpleNamespace(
                name=name,
                weights=None,
                hf=model_class(config).to(dtype).eval().requires_grad_(False),
                config=config,
                dtype=str(dtype).removeprefix("torch."),
                torch_dtype=dtype,
                device=CPU,
                groups=groups,
                vocab_size=config.vocab_size,
                max_position=config.max_position_embeddings,
                shape=None,
            )
            weights = model_weights.ModelWeights(model, mode if mode in ("int8", "int4") else "none")
            run(NativeRunner(weights, n_threads=n_threads))
        print(mode, flush=True)
    if threads_matter:  # the phases of a step are the same in every mode, and a linear by itself has one thread
        return
    for quantize in ("none", "int8", "int4"):
        run_predictions(quantize)
        run_assistants(quantize)
    print("predictions", flush=True)
    run_stored()
    print("stored", flush=True)
    run_adapters()
    print("adapters", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
