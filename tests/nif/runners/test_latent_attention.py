"""Models with compressed keys and values (MLA): exact in C, which caches them compressed, and in torch."""

import logging
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.runner import Entry, Logits

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.15, "eos_token_id": None,
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 24, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
MODELS: dict[str, Any] = {
    # V2-Lite's shape: queries are not compressed, and a token's experts are the likeliest of all.
    "deepseek v2": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(**SIZES, q_lora_rank=None, n_routed_experts=4, n_shared_experts=2, rope_parameters=YARN)
    ),
    "deepseek v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**SIZES, q_lora_rank=24, n_routed_experts=8, n_shared_experts=1, n_group=4, topk_group=2)
    ),
}
NEW = 12


# Of a token in three layers. In torch each of four heads keeps 48 + 24 numbers; in C 32 + 16 numbers are a key of all
# heads, and 32 of them are the value, too.
BYTES = {"torch": 3 * 4 * (48 + 24) * 4, "native": 3 * (32 + 16 + 32) * 4}


@pytest.mark.parametrize("runner", BYTES)
@pytest.mark.parametrize("kind", MODELS)
def test_text_is_that_of_generate_whatever_a_token_keeps(
    kind: str, runner: str, tmp_path: Path, tiny_models: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(3)
    hf = MODELS[kind]().eval()
    for name, buffer in hf.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.2)
    hf.save_pretrained(tmp_path)
    tiny_models.build_tokenizer(tmp_path)
    prompts = [torch.randint(3, 320, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 7)]
    wanted = [
        hf.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, len(prompt) :]
        for prompt in prompts
    ]
    with caplog.at_level(logging.INFO, "genbatch"):
        options = EngineOptions(model_path=str(tmp_path), n_gpu_layers=0, dtype="float32", n_ctx=1024, runner=runner)
        engine = load_engine(options)
    if runner == "torch":
        assert "3456 bytes a token" in caplog.text and "576 compressed" in caplog.text
    got: list[list[int]] = [[], []]
    with closing(engine.open_context(n_parallel=2, n_held=0, n_batch=64)) as context:
        assert context.runner.bytes_per_block(0, 16) == 16 * BYTES[runner]
        while len(got[0]) < NEW:
            entries = [
                Entry(slot, got[slot][-1:] or prompt, context.kv.length(slot), Logits.LAST)
                for slot, prompt in enumerate(prompts)
            ]
            for slot, logits in enumerate(context.eval(entries)):
                got[slot].append(int(logits[-1].argmax()))
    assert got == [row.tolist() for row in wanted]
