"""Text models inside checkpoints that also read pictures: token for token what transformers generates from text."""

import logging
import re
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3nConfig,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import ModelError
from genbatch.nif.models.model import describe_model
from genbatch.nif.runner import Entry, Logits

TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256, "sliding_window": 24,
    "initializer_range": 0.15, "eos_token_id": None,
}  # fmt: skip
SIGHT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_GEMMA4_SIGHT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 14,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "gemma3": lambda: Gemma3ForConditionalGeneration(Gemma3Config(text_config=TEXT, vision_config=SIGHT)),
    "mistral3": lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config={"model_type": "mistral", **TEXT},
            vision_config={"model_type": "pixtral", **SIGHT},
            tie_word_embeddings=False,
        )
    ),
}
# Every layer reads an embedding of its own; the last two read the keys and values of the two before them.
_MATFORMER: dict[str, Any] = {
    **TEXT,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "layer_types": [
        *("sliding_attention", "full_attention", "sliding_attention"), *("sliding_attention", "full_attention"),
    ],
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    # The layers that attend to everything have heads of twice the size.
    "gemma4": lambda: Gemma4ForConditionalGeneration(
        Gemma4Config(text_config={**_MATFORMER, "global_head_dim": 32, "use_double_wide_mlp": True},
                     vision_config=_GEMMA4_SIGHT)
    ),
    "gemma4 with experts": lambda: Gemma4ForConditionalGeneration(
        Gemma4Config(
            text_config={
                **_MATFORMER, "global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
                "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True,
                "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "final_logit_softcapping": 5.0,
            },
            vision_config=_GEMMA4_SIGHT,
        )
    ),
}  # fmt: skip
NEW = 12


MODELS |= GEMMA4
MODELS["qwen3 vl"] = lambda: Qwen3VLForConditionalGeneration(
    Qwen3VLConfig(
        text_config={
            **TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 5e5},
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 14, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
        },
    )
)  # fmt: skip


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, tiny_models: ModuleType) -> tuple[Path, Any]:
    torch.manual_seed(4)
    return saved(MODELS[request.param](), tmp_path, tiny_models)


def saved(hf: Any, directory: Path, tiny_models: ModuleType) -> tuple[Path, Any]:
    hf = hf.eval()
    hf.generation_config.eos_token_id = None
    hf.save_pretrained(directory)
    tiny_models.build_tokenizer(directory)
    return directory, hf


@pytest.mark.parametrize("runner", ["native", "torch"])
def test_text_is_that_of_the_whole_model(
    checkpoint: tuple[Path, Any], runner: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_text(*checkpoint, runner, caplog)


@pytest.mark.parametrize("runner", ["native", "torch"])
def test_the_text_model_of_gemma_3n_runs_alone(
    tmp_path: Path, tiny_models: ModuleType, runner: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its parts for pictures and sound need packages of their own, so the whole checkpoint is written by hand."""
    torch.manual_seed(4)
    sparsity = [0.5, 0.5, 0.0, 0.0, 0.0]
    config = Gemma3nTextConfig(
        **_MATFORMER,
        altup_num_inputs=3,
        laurel_rank=8,
        activation_sparsity_pattern=sparsity,
        final_logit_softcapping=5.0,
    )
    directory, hf = saved(Gemma3nForCausalLM(config), tmp_path, tiny_models)
    weights = load_file(directory / "model.safetensors")
    whole = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in weights.items()}
    whole["model.vision_tower.conv.weight"] = torch.ones(2)
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    whole_config = Gemma3nConfig(text_config=config.to_dict(), architectures=["Gemma3nForConditionalGeneration"])
    whole_config.save_pretrained(directory)
    check_text(directory, hf, runner, caplog)


def check_text(directory: Path, hf: Any, runner: str, caplog: pytest.LogCaptureFixture) -> None:
    prompt = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    # transformers 5.24 gives a Qwen3-VL other positions with a cache than without one.
    settings = {"do_sample": False, "pad_token_id": 0, "use_cache": not isinstance(hf, Qwen3VLForConditionalGeneration)}
    answer = hf.generate(torch.tensor([prompt]), max_new_tokens=NEW, **settings)
    options = EngineOptions(model_path=str(directory), n_gpu_layers=0, runner=runner, dtype="float32", n_ctx=1024)
    with caplog.at_level(logging.INFO, "genbatch"):
        engine = load_engine(options)
    assert re.search("only the text decoder is served, without .*(vision_tower|visual)", caplog.text)
    got: list[int] = []
    with closing(engine.open_context(n_parallel=1, n_held=0, n_batch=64)) as context:
        while len(got) < NEW:
            (logits,) = context.eval([Entry(0, got[-1:] or prompt, context.kv.length(0), Logits.LAST)])
            got.append(int(logits[-1].argmax()))
    assert got == answer[0, len(prompt) :].tolist()


def test_a_tensor_of_the_text_model_that_is_missing_is_named(checkpoint: tuple[Path, Any]) -> None:
    directory, _ = checkpoint
    weights = load_file(directory / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    del weights[name]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        describe_model(str(directory))
