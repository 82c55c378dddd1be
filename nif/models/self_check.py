"""Self-check: tests at the start that a model's own modules run correctly over the paged cache."""

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from genbatch.nif.errors import ModelError
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import NO_SHAPE, LayerGroup, LayerShape, RaggedBatch
from genbatch.nif.runners.torch_runner import ATTENTION_NAME, AttentionCall, StateScan, TorchRunner, convolved

_LENGTH = 12  # tokens of each of the two sequences
_CHUNK = 5  # tokens of the first step, which cross a block border
_BLOCK_SIZE = 4

# Most relative error of a row of logits. Rounding causes a fraction of it. A layer that ignores its cache, its mask or
# its position causes far more.
_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}


class _Probe:
    """A step without a cache that records each layer's shapes."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}
        self.others: dict[int, LayerShape] = {}  # of layers that do not attend

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend causally within the step, in plain torch; returns [T, H, Dv]."""
        if call.layer in self.calls:
            raise ValueError(f"layer {call.layer} attends twice")
        self.calls[call.layer] = call
        query, key, value = (x.transpose(0, 1)[None] for x in (call.query, call.key, call.value))
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        out = scaled_dot_product_attention(query, key.to(query.dtype), value.to(query.dtype), is_causal=True)
        return out[0].transpose(0, 1)

    def convolve(self, layer: int, inputs: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Convolve within the step; returns [T, channels]."""
        self.others[layer] = LayerShape(1, inputs.shape[1], 0)
        return convolved(inputs, len(inputs), taps, bias)

    def recur(self, layer: int, inputs: torch.Tensor, run: StateScan) -> torch.Tensor:
        """Run a recurrent layer within the step; returns [T, hidden]."""
        outputs, state = run(inputs, None)
        self.others[layer] = LayerShape(1, inputs.shape[1], 0, len(state))
        return outputs


def probe_layers(name: str, hf: PreTrainedModel, groups: tuple[LayerGroup, ...]) -> tuple[tuple[LayerShape, ...], int]:
    """Find each layer's shapes in the KV cache and the logits' width, by a forward of two tokens.

    Args:
        name: the model's name, for errors.
        groups: the groups from the configuration; a layer with another window is refused.

    Raises:
        ModelError: a layer bypasses the registered attention, or needs a feature that this attention does not have.
    """
    probe = _Probe()
    ids = torch.zeros((1, 2), dtype=torch.int64, device=hf.device)
    positions = torch.arange(2, device=hf.device)[None]
    try:
        with torch.inference_mode():
            output = hf(input_ids=ids, position_ids=positions, use_cache=False, genbatch_step=probe)
    except Exception as fault:
        raise ModelError(name, f"it cannot run over a paged KV cache: {fault}") from fault
    window_of = {layer: group.window for group in groups for layer in group.layers}
    attending = {layer for group in groups if not (group.convolves or group.recurs) for layer in group.layers}
    if probe.calls.keys() != attending:
        seen = f"{len(probe.calls)} of its {len(attending)} layers"
        raise ModelError(name, f"only {seen} attend through the registered function")
    if probe.others.keys() != window_of.keys() - attending:
        raise ModelError(name, f"{len(probe.others)} of its layers have states, but not the layers in config.json")
    shapes = dict(probe.others)
    for layer, call in sorted(probe.calls.items()):
        # None: the module leaves the window to the mask, which only the configuration describes.
        window = window_of[layer]
        if None not in (call.window, window) and call.window != window:
            raise ModelError(name, f"layer {layer} has a window of {call.window}, but config.json has {window}")
        shapes[layer] = LayerShape(call.key.shape[1], call.key.shape[2], call.value.shape[2])
    return tuple(shapes.get(layer, NO_SHAPE) for layer in range(max(shapes) + 1)), int(output.logits.shape[-1])


def check_paged_path(name: str, model: Model) -> None:
    """Compare the paged path with the model's own eager attention on a dozen random tokens.

    There are two sequences. The first sequence runs in two chunks. The second sequence runs in one step with the second
    chunk. The check is cheap compared with loading, and turns a model's peculiarities into an error at the start.

    Raises:
        ModelError: the logits differ by more than rounding explains.
    """
    drawn = torch.randint(model.vocab_size, (2, _LENGTH), generator=torch.Generator().manual_seed(0))
    tokens = drawn.to(model.torch_device)
    try:
        expected = _eager_logits(model.hf, tokens)
        paged = _paged_logits(model, tokens)
    except Exception as fault:
        raise ModelError(name, f"it cannot run over a paged KV cache: {fault}") from fault
    if not torch.isfinite(expected).all():
        raise ModelError(name, f"its logits in {model.dtype} are not all finite; try dtype float32")
    errors = torch.linalg.vector_norm(paged - expected, dim=-1) / torch.linalg.vector_norm(expected, dim=-1)
    # Take the median of each part, because a near tie between two experts may change a single token.
    parts = (errors[0, :_CHUNK], errors[0, _CHUNK:], errors[1])
    worst = max(float(part.median()) for part in parts)
    if not worst <= _TOLERANCE[model.dtype]:
        raise ModelError(name, f"its logits over a paged KV cache are off by {worst:.1%}")


@torch.inference_mode()
def _eager_logits(hf: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits without a cache: [2, _LENGTH, vocab_size] float32."""
    hf.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = hf(input_ids=tokens, use_cache=False).logits
        return logits.float()
    finally:
        hf.set_attn_implementation(ATTENTION_NAME)


def _paged_logits(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Return the same logits from TorchRunner, in a ragged mix."""
    runner = TorchRunner(model)
    blocks = -(-_LENGTH // _BLOCK_SIZE)
    runner.allocate([2 * blocks] * len(model.groups), _BLOCK_SIZE)
    numbers = tokens.cpu().numpy()
    first = runner.forward(_layout(model, numbers, [(0, 0, _CHUNK)]))
    second = runner.forward(_layout(model, numbers, [(0, _CHUNK, _LENGTH), (1, 0, _LENGTH)]))
    runner.close()
    return torch.cat([torch.as_tensor(first), torch.as_tensor(second)]).view(2, _LENGTH, -1)


def _layout(model: Model, tokens: np.ndarray, parts: list[tuple[int, int, int]]) -> RaggedBatch:
    """Build a batch of (sequence, first position, one past the last position); a sequence's blocks are consecutive."""
    blocks = -(-_LENGTH // _BLOCK_SIZE)
    positions = np.concatenate([np.arange(start, stop) for _, start, stop in parts])
    # Sequence s lies at the positions from s * blocks * _BLOCK_SIZE on, so its slots are consecutive.
    shifts = np.concatenate([np.full(stop - start, s * blocks * _BLOCK_SIZE) for s, start, stop in parts])
    table = np.array([[s * blocks + b for b in range(blocks)] for s, _, _ in parts], np.int32)
    lengths = [stop - start for _, start, stop in parts]
    num_groups = len(model.groups)
    return RaggedBatch(
        input_ids=np.concatenate([tokens[s, start:stop] for s, start, stop in parts]),
        positions=positions,
        query_starts=np.cumsum([0, *lengths]).astype(np.int32),
        kv_lens=np.array([stop for _, _, stop in parts], np.int32),
        slots=(positions + shifts,) * num_groups,
        block_tables=(table,) * num_groups,
        logit_rows=np.arange(sum(lengths)),
        max_query_len=max(lengths),
        max_kv_len=max(stop for _, _, stop in parts),
    )
