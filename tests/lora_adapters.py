"""Random LoRA adapters as PEFT writes them, and PEFT's own greedy text with them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(
    base: Path, out: Path, targets: Sequence[str] | str = ALL, *, rank: int = 4, seed: int = 0, **config: Any
) -> Path:
    """Saves a random adapter of the model in `base`, strong enough to change what it says."""
    peft = pytest.importorskip("peft")
    hf = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wanted = targets if isinstance(targets, str) else list(targets)
    made = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=wanted, task_type="CAUSAL_LM", **config)
    peft.get_peft_model(hf, made).save_pretrained(out)
    random = torch.Generator().manual_seed(seed)
    tensors = load_file(out / "adapter_model.safetensors")
    changed = {name: 0.15 * torch.randn(tensor.shape, generator=random) for name, tensor in sorted(tensors.items())}
    save_file(changed, out / "adapter_model.safetensors")
    return out


def change_config(adapter: Path, **fields: Any) -> None:
    """Other values for fields of adapter_config.json."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(adapter: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Another adapter_model.safetensors: what `change` leaves of the tensors."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


class PeftOracle:
    """transformers' greedy text of a model in float32, with PEFT's adapters and without; answers are remembered.

    Args:
        base: the model's directory, or transformers' module, which is changed.
        adapters: their directories, by the names that they have here.
    """

    def __init__(self, base: Path | Any, adapters: Mapping[str, Path]) -> None:
        peft = pytest.importorskip("peft")
        hf = base
        if isinstance(base, Path):
            hf = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        (first, directory), *others = adapters.items()
        self._model = peft.PeftModel.from_pretrained(hf, directory, adapter_name=first)
        for name, directory in others:
            self._model.load_adapter(directory, adapter_name=name)
        self._model.eval()
        self._answers: dict[tuple[str | None, tuple[int, ...], int], list[int]] = {}

    @torch.inference_mode()
    def generate(self, adapter: str | None, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The new token ids, whatever would end them."""
        key = adapter, tuple(prompt), max_tokens
        if key not in self._answers:
            ids = torch.tensor([list(prompt)])
            settings: dict[str, Any] = {
                "attention_mask": torch.ones_like(ids),
                "max_new_tokens": max_tokens,
                "do_sample": False,
                "eos_token_id": -1,
            }
            if adapter is None:
                with self._model.disable_adapter():
                    out = self._model.generate(input_ids=ids, **settings)
            else:
                self._model.set_adapter(adapter)
                out = self._model.generate(input_ids=ids, **settings)
            self._answers[key] = out[0, len(prompt) :].tolist()
        return self._answers[key]

    @torch.inference_mode()
    def logits(self, adapter: str, tokens: Sequence[int]) -> torch.Tensor:
        """The logits after every token, [len(tokens), vocab_size]."""
        self._model.set_adapter(adapter)
        rows: torch.Tensor = self._model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return rows
