"""What a pool and its steps take is no more than was predicted, nor much less: measured in a process of its own.

Run as a program, it prints the bytes that the worst steps took beside the KV pool, and those predicted.
"""

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.runner import Entry, Logits
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState, SamplingParams, token_logprobs

_SEQUENCES, _N_CTX, _BLOCK = 8, 2048, 16

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux tells how much memory a process took at most"
)


@pytest.mark.parametrize("runner", ["native", pytest.param("torch", marks=pytest.mark.long)])
def test_h08_the_footprint_of_the_packaged_model_is_what_was_predicted(runner: str) -> None:
    _check("smollm2", runner, 512)


@pytest.mark.long
@pytest.mark.parametrize("runner", ["native", "torch"])
def test_h08_the_footprint_of_a_model_with_many_tokens_is_what_was_predicted(
    runner: str, tiny_models: ModuleType, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**tiny_models._GROUPED, "head_dim": 16, "vocab_size": 150_001, "max_position_embeddings": 1024}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    tiny_models.build_tokenizer(tmp_path)
    _check(str(tmp_path), runner, 128)


def _check(model: str, runner: str, n_batch: int) -> None:
    command = [sys.executable, __file__, model, runner, str(n_batch)]
    # A fixed threshold keeps large tensors out of glibc's heap. Its holes differ from run to run; `spare` is for them.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    measured, predicted = (int(number) for number in output.split()[-2:])
    assert measured > 16 << 20, "there is something to measure"
    # What torch takes for its products differs by CPU. On a Zen 5 it took 131 MB, where 198 MB were predicted.
    assert measured <= predicted <= 1.6 * measured, f"predicted {predicted}, took {measured}"


def _measure(model: str, runner: str, n_batch: int) -> tuple[int, int]:
    engine = load_engine(
        EngineOptions(
            model_path=model,
            dtype="float32",
            n_gpu_layers=0,
            runner=runner,
            n_ctx=_N_CTX,
            block_size=_BLOCK,
            weights_cache=0,  # mapped weights are in the prediction, and are no memory of the process
        )
    )
    footprint = engine._cache_size(engine._new_runner(_SEQUENCES), _SEQUENCES, 0, n_batch).footprint
    ctx = engine.open_context(n_parallel=_SEQUENCES, n_held=0, n_batch=n_batch)
    for group, count in enumerate(ctx.kv.num_blocks):
        zeros = np.zeros((1, ctx.runner.bytes_per_block(group, _BLOCK)), np.uint8)
        for block in range(count):
            ctx.runner.write_blocks(group, [block], zeros)
    prompt = [3 + place * 7 % 300 for place in range(ctx.max_positions)]

    def step(seq_ids: list[int], start: int, stop: int) -> None:
        """Wants all that a step can give: every token's score, and a draw that ranks whole rows."""
        params = SamplingParams(temperature=5.0, top_p=0.99, seed=1, repetition_penalty=1.1, logprobs=20)
        states = [SamplerState(params, prompt[:9]) for _ in seq_ids]

        def read(parts: list[np.ndarray], drawn: list[Sampled | SampleFault | None]) -> None:
            for rows in parts:
                token_logprobs(rows[:-1], np.array(prompt[1 : len(rows)], np.int64), 20)

        entries = [Entry(seq_id, tuple(prompt[start:stop]), start, Logits.ALL) for seq_id in seq_ids]
        ctx.step_and_read(entries, states, read)

    step([0], 0, 4)  # what is made at the first step of all is not what a step takes
    ctx.seq_rm(0)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    start = max(0, len(prompt) - n_batch)
    if start:
        ctx.prefill(prompt[:start], 0, 0)
    step([0], start, len(prompt))  # the longest sequence's last chunk
    ctx.seq_rm(0)
    step(list(range(_SEQUENCES)), 0, n_batch // _SEQUENCES)  # and everybody's first
    return _status("VmHWM") - before, footprint.total - footprint.kv


def _status(key: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


if __name__ == "__main__":
    print(*_measure(sys.argv[1], sys.argv[2], int(sys.argv[3])))
