"""Every architecture that the C kernels know: greedy text is that of `generate`, alone and in every company."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from genbatch.nif.cuda_device import CPU
from genbatch.nif.errors import ModelError
from genbatch.nif.models.architectures import ARCHITECTURES, layer_groups, max_position
from genbatch.nif.models.model import describe_model
from genbatch.nif.native.build import NativeUnavailable
from genbatch.nif.native.model_weights import ModelWeights
from genbatch.nif.native.runner import NativeRunner
from genbatch.nif.runner import RaggedBatch

NAMES = [
    "gemma", "gemma_wide", "gemma2", "gemma3", "phi3", "olmo2", "granite", "smollm3", "glm", "glm4", "starcoder2",
    "nemotron", "stablelm", "gpt_neox", "qwen3_moe", "mixtral", "gpt_oss", "lfm2",
    "apertus", "hunyuan", "hunyuan_moe", "deepseek2", "deepseek2_groups", "deepseek3", "glm4_moe_lite",
    "qwen2_moe", "olmoe", "glm4_moe", "ernie", "ernie_moe", "olmo3", "ministral", "ministral3",
    "seed_oss", "cwm", "helium", "arcee", "exaone4", "cohere2", "qwen3_5", "qwen3_5_moe", "qwen3_next",
    "bamba", "granite_hybrid", "granite_hybrid_dense", "gemma3n", "gemma4", "gemma4_unified", "gemma4_experts",
    "granite_moe", "granite_moe_shared", "granite_swa", "granite_moe_swa", "phimoe",
    "lfm3", "phi", "cohere", "cohere2_moe", "vault_gemma", "hyperclovax", "youtu", "dots1", "exaone_moe", "solar_open",
    "minimax_m2",
    "falcon_h1", "falcon_h1_gate_last", "falcon_h1_plain",
    "mamba2", "nemotron_h", "nemotron_h_attends_last", "lfm2_moe", "olmo_hybrid", "olmo_hybrid_rope",
]  # fmt: skip
MODES = ("float32", "bfloat16", "int8")
# Median error of a row of logits: a near tie between two experts may send one row another way.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-1, "int8": 1.5e-1}
BLOCK = 16
BLOCKS = 6  # of a sequence
SHARED = 4  # blocks that two sequences have in common: one chunk of 64 keys
NEW = 8  # tokens


@pytest.fixture(scope="module")
def described(models: ModuleType) -> Callable[[str, str], Any]:
    """described("gemma2", "int8") is what the runner asks of a model, in float32 or, for that mode, in bfloat16."""
    made: dict[str, Any] = {}

    def make(name: str, mode: str) -> Any:
        if name not in made:
            made[name] = models.random_model(name)
        hf = deepcopy(made[name]).bfloat16() if mode == "bfloat16" else made[name]  # what is rounded stays so
        return SimpleNamespace(
            name=name,
            hf=hf,
            config=hf.config,
            dtype=str(hf.dtype).removeprefix("torch."),
            torch_dtype=hf.dtype,
            device=CPU,
            groups=layer_groups(name, hf.config),
            vocab_size=hf.config.vocab_size,
            max_position=max_position(name, hf.config),
            weights=None,
            shape=None,
        )

    return make


def prompts() -> list[list[int]]:
    """One longer than a chunk and two windows, a short one, and one that begins as the first."""
    drawn: list[int] = torch.randint(3, 320, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    long = drawn[:70]
    return [long, drawn[70:79], long[: SHARED * BLOCK] + drawn[80:85]]


class Pool:
    """A runner with a pool, and the blocks of three sequences of which the third shares the first's beginning."""

    def __init__(self, weights: ModelWeights, n_threads: int) -> None:
        self.runner = NativeRunner(weights, n_threads=n_threads)
        self.runner.allocate([3 * BLOCKS] * len(self.runner.groups), BLOCK)
        self.tables = np.arange(3 * BLOCKS, dtype=np.int32).reshape(3, BLOCKS)
        self.past = [0, 0, 0]

    def share(self) -> None:
        self.tables[2, :SHARED] = self.tables[0, :SHARED]
        self.past[2] = SHARED * BLOCK

    def step(self, parts: Sequence[tuple[int, Sequence[int]]], rows: Sequence[int] | None = None) -> list[np.ndarray]:
        """Evaluate these tokens of these sequences; return the logits of these rows, or of each part's last one."""
        at = [np.arange(self.past[s], self.past[s] + len(tokens)) for s, tokens in parts]
        slots = [
            self.tables[s][p // BLOCK].astype(np.int64) * BLOCK + p % BLOCK for (s, _), p in zip(parts, at, strict=True)
        ]
        lengths = [len(tokens) for _, tokens in parts]
        ends = np.cumsum(lengths)
        for s, tokens in parts:
            self.past[s] += len(tokens)
        groups = len(self.runner.groups)
        kv_lens = [self.past[s] for s, _ in parts]
        logits = self.runner.forward(
            RaggedBatch(
                input_ids=np.array([token for _, tokens in parts for token in tokens]),
                positions=np.concatenate(at),
                query_starts=np.array([0, *ends], np.int32),
                kv_lens=np.array(kv_lens, np.int32),
                slots=(np.concatenate(slots),) * groups,
                block_tables=(self.tables[[s for s, _ in parts]],) * groups,
                logit_rows=ends - 1 if rows is None else np.array(rows, np.int64),
                max_query_len=max(lengths),
                max_kv_len=max(kv_lens),
            )
        )
        return list(logits)


def alone(weights: ModelWeights) -> list[np.ndarray]:
    """Each prompt's logits, [NEW, vocab], by itself and its prompt in one piece."""
    rows = []
    for s, prompt in enumerate(prompts()):
        pool = Pool(weights, n_threads=2)
        row = pool.step([(s, prompt)])
        while len(row) < NEW:
            row += pool.step([(s, [int(row[-1].argmax())])])
        pool.runner.close()
        rows.append(np.stack(row))
    return rows


def mixed(weights: ModelWeights) -> list[np.ndarray]:
    """The same with prompts cut up, beside one another, and the third's beginning taken from the first."""
    first, second, third = prompts()
    pool = Pool(weights, n_threads=1)  # of one thread, two sequences that share are worked on together
    rows: list[list[np.ndarray]] = [[], [], []]

    def next_of(s: int) -> tuple[int, list[int]]:
        return s, [int(rows[s][-1].argmax())]

    rows[1] += pool.step([(0, first[:33]), (1, second)])[1:]
    rows[1] += pool.step([next_of(1), (0, first[33:64])])[:1]
    pool.share()
    for s, row in zip((2, 1, 0), pool.step([(2, third[64:]), next_of(1), (0, first[64:])]), strict=True):
        rows[s].append(row)
    while any(len(row) < NEW for row in rows):
        for row, logits in zip(rows, pool.step([next_of(s) for s in range(3)]), strict=True):
            row.append(logits)
    pool.runner.close()
    return [np.stack(row[:NEW]) for row in rows]


def with_rows(weights: ModelWeights, rows: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The logits of these rows of a step that has 13, and those of the sequences' next tokens."""
    first, second, third = prompts()
    pool = Pool(weights, n_threads=1)
    pool.step([(0, first[:64])])
    pool.share()
    logits = pool.step([(2, third[64:67]), (1, second), (0, first[64:65])], rows)
    after = pool.step([(0, first[65:66]), (1, [5]), (2, third[67:68])])
    pool.runner.close()
    return logits, after


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_nobody_asks_for_change_nothing(described: Callable[[str, str], Any], name: str) -> None:
    """A step may ask for some rows, in any order and twice. All keys and states are written, and no logit changes."""
    weights = ModelWeights(described(name, "float32"))
    everything, after = with_rows(weights, range(13))
    for rows in ([12, 5, 0, 1, 2, 5], [7, 8, 2], [*range(13), 12, 5], []):
        logits, then = with_rows(weights, rows)
        assert len(logits) == len(rows) and all(map(np.array_equal, logits, [everything[row] for row in rows]))
        assert all(map(np.array_equal, then, after))


def test_every_architecture_is_tried(models: ModuleType) -> None:
    tried = {model_class.__name__ for model_class, _ in models.CONFIGS.values()}
    assert tried == set(ARCHITECTURES)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_that_of_generate_in_every_company(described: Callable[[str, str], Any], name: str) -> None:
    model = described(name, "float32")
    weights = ModelWeights(model)
    got = alone(weights)
    assert all(map(np.array_equal, mixed(weights), got))
    model.hf.set_attn_implementation("eager")
    for prompt, logits in zip(prompts(), got, strict=True):
        with torch.inference_mode():
            answer = model.hf.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, use_cache=True)
        text = answer[0, len(prompt) :].tolist()
        assert logits.argmax(1)[: len(text)].tolist() == text  # which ends where the model says so


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_every_format_is_near_and_the_same_in_every_company(
    described: Callable[[str, str], Any], name: str, mode: str
) -> None:
    model = described(name, mode)
    weights = ModelWeights(model, "int8" if mode == "int8" else "none")
    got = alone(weights)
    assert all(map(np.array_equal, mixed(weights), got))
    model.hf.float().set_attn_implementation("eager")
    for prompt, logits in zip(prompts(), got, strict=True):
        text = [*prompt, *logits.argmax(1)[:-1].tolist()]
        with torch.inference_mode():
            want = model.hf(torch.tensor([text]), use_cache=False).logits[0, len(prompt) - 1 :]
        assert float(((torch.from_numpy(logits) - want).norm(dim=1) / want.norm(dim=1)).median()) < TOLERANCE[mode]


FROM_FILES = [
    "stablelm",
    "gpt_neox",
    "nemotron",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "qwen2_moe",
    "olmoe",
    "glm4_moe",
    "ernie_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "granite_hybrid",
    "granite_moe_shared",
    "granite_moe_swa",
    "phimoe",
    "gemma3n",
    "falcon_h1",
    "mamba2",
    "nemotron_h",
    "lfm2_moe",
    "olmo_hybrid",
    "lfm3",
    "exaone_moe",
    "minimax_m2",
    "cohere2_moe",
    "dots1",
    "phi",
]


@pytest.mark.parametrize("name", FROM_FILES)
def test_files_give_the_weights_that_the_module_has(
    models: ModuleType, tiny_models: ModuleType, described: Callable[[str, str], Any], tmp_path: Path, name: str
) -> None:
    """Whatever the files call the tensors; two of these classes cannot attend over blocks by themselves."""
    models.build_native_model(name, tmp_path, tiny_models.build_tokenizer)
    from_files = describe_model(str(tmp_path), dtype="float32")
    assert from_files is not None and from_files.weights is not None
    first = [Pool(ModelWeights(model), n_threads=1) for model in (from_files, described(name, "float32"))]
    got, want = (pool.step([(0, prompts()[0])])[0] for pool in first)
    assert np.array_equal(got, want)
    for pool in first:
        pool.runner.close()


@pytest.mark.parametrize("taken", [0, 7])
def test_more_experts_than_there_are_are_refused(described: Callable[[str, str], Any], taken: int) -> None:
    model = described("mixtral", "float32")
    model.config = deepcopy(model.config)
    model.config.num_experts_per_tok = taken
    with pytest.raises(NativeUnavailable, match=f"a token takes {taken} of 4 experts"):
        ModelWeights(model)


def test_a_file_that_lacks_an_expert_is_named(models: ModuleType, tiny_models: ModuleType, tmp_path: Path) -> None:
    models.build_native_model("mixtral", tmp_path, tiny_models.build_tokenizer)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = describe_model(str(tmp_path), dtype="float32")
    assert model is not None
    with pytest.raises(ModelError, match=r"model.layers.1.(mlp|block_sparse_moe).experts.3.w2.weight"):
        ModelWeights(model)
