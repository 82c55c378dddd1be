"""LayerLoader: finds a model's tensors by the names of its architecture, and packs them into the structs for C.

loader = LayerLoader(model, architecture, source, packer, WEIGHT_F32)
layers[0] = loader.layer(0)
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import softplus

from genbatch.nif.errors import ModelError
from genbatch.nif.models.architecture import (
    NONE,
    PER_HEAD,
    AltUpNames,
    Architecture,
    AssistantNames,
    ConvolutionNames,
    ExpertNames,
    LatentNames,
    MtpNames,
    RecurrenceNames,
    SomeRows,
    gated_rows,
    heads_of,
    latent_rows,
    qkv_names,
)
from genbatch.nif.models.architectures import layer_shapes
from genbatch.nif.models.loaded_model import module_shape
from genbatch.nif.models.weight_source import CODE_KINDS, StoredTensor, WeightSource, bytes_per_row
from genbatch.nif.native.library import (
    COLUMNS,
    WEIGHT_BF16,
    WEIGHT_F32,
    WEIGHT_I8,
    WEIGHT_U4,
    AltUp,
    Clusters,
    Experts,
    Latent,
    Layer,
    Linear,
    Norm,
    Pair,
    StateLayer,
    Table,
)
from genbatch.nif.native.weights import WeightPacker, interleave_gate_up, stored_kind

if TYPE_CHECKING:
    from genbatch.nif.models.loaded_model import Model


_I8_GROUP = 64  # inputs that share a scale
I8_HEAD_GROUP = 32  # for the head, which decides between near ties: the finer scale saves two thirds of int8's loss


def keeps_8_bits(layer: int, num_layers: int) -> bool:
    """Return whether int4 keeps 8 bits for a layer's queries, keys, values and down projection.

    Rounding hurts these matrices most. llama.cpp's Q4_K_M gives more bits to the same layers: an eighth of the layers
    at either end, and every third layer between.
    """
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


class LayerLoader:
    """Finds a model's tensors by the names of its architecture, and packs them."""

    def __init__(
        self, model: "Model", architecture: Architecture, source: WeightSource, packer: WeightPacker, kind: int
    ) -> None:
        self._name = model.name
        self._config: Any = model.config
        self._architecture = architecture
        self._source = source
        self._packer = packer
        self._kind = kind
        # The source must have the module's tensors in the same shapes, except experts, which may be merged in either.
        self._shapes = module_shape(model).tensors
        self._kept_alive: list[Any] = []  # keeps the structs' targets in memory
        self._plain, self._dtype = WEIGHT_BF16 if model.dtype == "bfloat16" else WEIGHT_F32, model.torch_dtype
        self._cached = layer_shapes(self._config)

    def mtp(self, names: MtpNames, like: int) -> tuple[Layer, Pair, Norm]:
        """Build the MTP layer in the form of layer `like`, its input, and the norm after it.

        The caller sets the layer's group and rotary table, and the input's embedding.
        """
        own, hidden = self._architecture.tensors.layer.format(like), self._config.hidden_size
        shapes = {name.removeprefix(own): shape for name, shape in self._shapes.items() if name.startswith(own)}
        self._shapes = {**self._shapes, **{names.layer + name: shape for name, shape in shapes.items()}}
        self._shapes[f"{names.input}.weight"] = hidden, 2 * hidden
        embedding_norm, state_norm, final_norm = map(self.norm, (*names.norms, names.final_norm))
        pair = Pair(embedding_norm=embedding_norm, state_norm=state_norm, input=self.linear([names.input]))
        return self.layer(like, names.layer), pair, final_norm

    def pair(self, names: AssistantNames) -> Any:
        """Return a pointer to an assistant's input, without the embedding of the other model."""
        struct = Pair(input=self.linear([names.input]), output=self.linear([names.output]))
        self._kept_alive.append(struct)
        return ctypes.pointer(struct)

    def clustered(self, name: str, names: AssistantNames, group: int, kind: int) -> tuple[Linear, Any]:
        """Build a head with its outputs in the order of their clusters; also returns a pointer to the clusters."""
        tokens = self.tensor(names.ordering).whole().to(torch.int32)
        matrix = self.tensor(f"{name}.weight")
        if not torch.equal(tokens.sort().values, torch.arange(matrix.shape[0], dtype=torch.int32)):
            raise ModelError(self._name, f"{names.ordering} does not name each of {matrix.shape[0]} tokens once")
        struct = Clusters(
            centroids=self.linear([names.centroids]),
            tokens=self._packer.put(tokens),
            count=names.clusters,
            chosen=names.chosen,
        )
        self._kept_alive.append(struct)
        head = self._pack([_rows(matrix, tokens.numpy())], [None], group=group, kind=kind)
        return head, ctypes.pointer(struct)

    def layer(self, index: int, start: str | None = None) -> Layer:
        """Build one layer; the caller sets its place in a group and its rotary table.

        Args:
            start: the prefix of the layer's tensors; None takes the architecture's prefix.
        """
        architecture = self._architecture
        experts, tensors = architecture.experts, architecture.tensors_of(index)
        start = start or tensors.layer.format(index)
        kind = self._kind
        if kind == WEIGHT_U4 and keeps_8_bits(index, self._config.num_hidden_layers):
            kind = WEIGHT_I8
        shape, convolution, recurrence = self._cached[index], architecture.convolution, architecture.recurrence
        layer = Layer(
            num_kv_heads=max(shape.num_kv_heads, 1),
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            scale=1.0 if tensors.scale is None else self.tensor(start + tensors.scale).whole().item(),
        )
        if convolution is not None and index in convolution.layers:
            self._convolution(layer, start, convolution, kind)
        if recurrence is not None and index in recurrence.layers:
            self._recurrence(layer, start, recurrence, kind)
        if architecture.latent is not None:
            self._latent(layer, start, architecture.latent, kind)
        elif architecture.attends(index):
            self._attention(layer, start, kind)
        if layer.qkv.n or layer.recurrence:
            layer.attention_norm = self.norm(tensors.attention_norm, start)
            layer.attention_post = self.norm(tensors.attention_post, start)
        if architecture.mlps is not None and index not in architecture.mlps:
            return layer
        layer.mlp_norm = self.norm(tensors.mlp_norm, start)
        layer.mlp_post = self.norm(tensors.mlp_post, start)
        own = self._architecture.layer_embeddings
        if own is not None:
            layer.input_gate = self.linear([start + own.gate])
            layer.input_projection = self.linear([start + own.back])
            layer.input_post = self.norm(own.post, start)
        if architecture.altup is not None:
            layer.altup = self._altup(start, architecture.altup)
        mixes = experts is not None and (experts.layers is None or index in experts.layers)
        if experts is not None and mixes:
            layer.experts = self._experts(start, experts, kind)
        if experts is None or not mixes or experts.own_norms:
            layer.intermediate = self.tensor(f"{start}{tensors.down}.weight").shape[1]
            layer.sparse, layer.deviations = index in architecture.sparse, architecture.sparse.get(index, 0.0)
            ups = [start + name for name in tensors.gate_up]
            layer.gate_up = self.linear(ups) if layer.sparse else self._gate_up(ups)
            if tensors.xielu is not None:
                square, curve, slope, least = (self.tensor(start + name).whole() for name in tensors.xielu)
                layer.square, layer.slope, layer.least = softplus(square).item(), slope.item(), least.item()
                layer.curve = (slope + softplus(curve)).item()
            layer.down = self.linear([start + tensors.down], kind=kind)
        return layer

    def _attention(self, layer: Layer, start: str, kind: int) -> None:
        tensors = self._architecture.tensors
        names = qkv_names([start + name for name in tensors.qkv], self._shapes)
        layer.qkv = self._qkv(names, layer, kind)
        layer.out = self.linear([start + tensors.out])
        layer.q_norm = self._head_norm(start + tensors.q_norm, heads_of(self._config))
        if len(names) > 1 or len(tensors.qkv) == 1:
            layer.k_norm = self._head_norm(start + tensors.k_norm, layer.num_kv_heads)
        if self._architecture.value_norm:
            layer.v_norm = Norm(self._packer.put_floats(torch.ones(layer.value_dim)))
        if tensors.sinks is not None:
            layer.sinks = self._floats(start + tensors.sinks)

    def _latent(self, layer: Layer, start: str, names: LatentNames, kind: int) -> None:
        """Build the linears to the queries and the latent, and each head's matrices to and from the latent."""
        _, row_norm, to_queries = names.query
        layer.qkv = self._rows_of(start, latent_rows(names), kind)
        layer.out = self.linear([start + self._architecture.tensors.out])
        heads = heads_of(self._config)
        pairs = [self._head_matrices(start, names, head) for head in range(heads)]
        own = WEIGHT_I8 if self._kind == WEIGHT_U4 else self._kind  # these weights are few, and affect all scores
        meet, give = ((Linear * heads)(*(self._pack([pair[i]], [None], kind=own) for pair in pairs)) for i in (0, 1))
        struct = Latent(
            queries=self.linear([start + to_queries]) if names.query_rank else Linear(),
            query_norm=self.norm(row_norm if names.query_rank else None, start),
            norm=self.norm(names.latent[1], start),
            meet=meet,
            give=give,
            query_rank=names.query_rank,
            rank=names.rank,
            rotated=names.rotated,
            plain=names.plain,
            value_dim=names.value_dim,
            eps=names.eps,
        )
        self._kept_alive += [meet, give, struct]
        layer.latent = ctypes.pointer(struct)

    def _head_matrices(self, start: str, names: LatentNames, head: int) -> tuple[StoredTensor, StoredTensor]:
        """Return the matrix from a head's query to the latents' space, and that from latents to the head's value."""
        heads, keys, values = heads_of(self._config), f"{start}{names.keys}.weight", f"{start}{names.values}.weight"
        if keys in self._source.names():
            by_query = self.tensor(keys, (heads, names.rank, names.plain)).part(head)
            return by_query, self.tensor(values, (heads, names.value_dim, names.rank)).part(head)
        both = self.tensor(f"{start}{names.keys_values}.weight")
        key, value = np.split(np.arange(names.plain + names.value_dim), [names.plain])
        first = head * (names.plain + names.value_dim)
        return _stored(_rows(both, first + key).whole().T), _rows(both, first + value)

    def _altup(self, start: str, names: AltUpNames) -> Any:
        """Return a pointer to the layer's alternating updates. The small linears are in float32, as routers are."""
        norm, router = names.router
        left, right, post = names.laurel
        routes = self.tensor(f"{start}{router}.weight").whole() / self._config.hidden_size
        struct = AltUp(
            router_norm=self.norm(norm, start),
            router=self._packer.put_floats(routes),
            predict=self._floats(f"{start}{names.predict}.weight"),
            correct=self._floats(f"{start}{names.correct}.weight"),
            output_scale=None if names.output_scale is None else self._floats(start + names.output_scale),
            left=self.linear([start + left]),
            right=self.linear([start + right]),
            post=self.norm(post, start),
        )
        self._kept_alive.append(struct)
        return ctypes.pointer(struct)

    def merges(self, names: AltUpNames) -> Any:
        """Return the linears of the last layer's streams; the first stream's has no outputs."""
        linears = (Linear * names.streams)()
        for stream in range(1, names.streams):
            linears[stream] = self.linear([names.merge.format(stream - 1)])
        self._kept_alive.append(linears)
        return linears

    def _convolution(self, layer: Layer, start: str, names: ConvolutionNames, kind: int) -> None:
        layer.qkv = self.linear([start + names.inputs], kind=kind)
        layer.out = self.linear([start + names.out])
        taps = self.tensor(f"{start}{names.taps}.weight").whole()  # [channels, 1, taps]
        layer.taps = self._packer.put_floats(taps[:, 0].T.flatten())
        bias = self._bias(start + names.taps)
        if bias is not None:
            layer.tap_bias = self._packer.put_floats(bias)

    def _recurrence(self, layer: Layer, start: str, names: RecurrenceNames, kind: int) -> None:
        begin = start + names.start
        channels = _order(names.channels, names.key_heads * names.key_dim * 2 + names.heads * names.value_dim)
        out = self.tensor(f"{begin}{names.out}.weight")
        places = np.arange(names.heads, dtype=np.int32)
        if out.column_order is not None:  # keep the file's blocks whole; heads write to the places of their columns
            places = (out.column_order[:: names.value_dim] // names.value_dim).astype(np.int32)
        *inputs, gates = names.inputs
        taps = self.tensor(f"{begin}conv1d.weight").whole()[:, 0][channels]  # [channels, taps]
        bias = self._bias(f"{begin}conv1d")
        put = self._packer.put_floats
        struct = StateLayer(
            inputs=self._rows_of(
                start, (*inputs, _heads_placed(gates, places, names.value_dim)), kind, names.input_factor
            ),
            out=self._linear([replace(out, column_order=None)], [f"{begin}{names.out}"]),
            taps=put(taps.T.flatten()),
            tap_bias=None if bias is None else put(bias[channels]),
            rates=put(-self.tensor(f"{begin}A_log").whole().flatten().exp()),
            step_bias=put(self.tensor(f"{begin}dt_bias").whole().flatten()),
            skips=None if names.skip is None else put(self.tensor(f"{begin}{names.skip}").whole().flatten()),
            places=self._packer.put(torch.from_numpy(places)),
            gate_norm=self._gate_norm(begin, names),
            gate_eps=self._architecture.norm_eps if names.gate_eps is None else names.gate_eps,
            strength=names.strength,
            kernel=names.kernel,
            channels=len(channels),
            heads=names.heads,
            key_heads=names.key_heads,
            key_dim=names.key_dim,
            value_dim=names.value_dim,
            corrects=names.corrects,
            norm_groups=names.norm_groups,
            gate_first=names.gate_first,
        )
        self._kept_alive.append(struct)
        layer.recurrence = ctypes.pointer(struct)

    def _gate_norm(self, begin: str, names: RecurrenceNames) -> Norm:
        if names.norm is None:
            return Norm()
        weight = self.tensor(f"{begin}{names.norm}.weight").whole().flatten()
        return Norm(self._packer.put_floats(weight.repeat(names.heads * names.value_dim // len(weight))))

    def _rows_of(self, start: str, rows: Sequence[SomeRows], kind: int, input_factor: float = 1.0) -> Linear:
        """Build one linear from some rows of several matrices; `input_factor` multiplies its products."""
        matrices, biases, factors = [], [], []
        for some in rows:
            matrix, bias = self.tensor(f"{start}{some.name}.weight"), self._bias(start + some.name)
            order = _order(some.parts, matrix.shape[0])
            sizes = torch.tensor([len(part) for part in some.parts or (order,)])
            factor = torch.tensor(some.factors or (1.0,) * len(sizes)).repeat_interleave(sizes)
            matrices.append(_rows(matrix, order))
            biases.append(None if bias is None else bias[torch.from_numpy(order)] * factor)
            factors.append(factor * input_factor)
        return self._pack(matrices, biases, kind=kind, factors=factors)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """Return a tensor of the source.

        Raises:
            ModelError: the tensor is missing, or its shape differs from the configuration's.
        """
        tensor = self._source.tensor(self._architecture.tensors.stored(name, self._source.names()))
        expected = shape or self._shapes.get(name, tensor.shape) or (1,)  # here a single number has one dimension
        if (tensor.shape or (1,)) != expected:
            raise ModelError(
                self._name, f"{name} has the shape {list(tensor.shape)}; config.json needs {list(expected)}"
            )
        return tensor

    def norm(self, name: str | None, start: str = "") -> Norm:
        """Build a norm by its name; None means that there is no norm."""
        return Norm() if name is None else self._norm([start + name])

    def linear(
        self, names: Sequence[str], group: int = _I8_GROUP, kind: int | None = None, input_factor: float = 1.0
    ) -> Linear:
        """Build one linear from matrices that are stacked along the outputs; `input_factor` multiplies its products."""
        matrices = [self.tensor(f"{name}.weight") for name in names]
        return self._linear(matrices, names, group=group, kind=kind, input_factor=input_factor)

    def _linear(
        self, matrices: Sequence[StoredTensor], names: Sequence[str], *, input_factor: float = 1.0, **how: Any
    ) -> Linear:
        """Build one linear with the biases and the factors that belong to the matrices' names."""
        own = [self._factor(name) for name in names]
        biases = [self._bias(name) for name in names]
        scaled = [None if bias is None else bias * factor for bias, factor in zip(biases, own, strict=True)]
        pairs = zip(matrices, own, strict=True)
        factors = [torch.full((matrix.shape[0],), factor * input_factor) for matrix, factor in pairs]
        return self._pack(matrices, scaled, factors=factors, **how)

    def _factor(self, name: str) -> float:
        return next((factor for end, factor in self._architecture.factors.items() if name.endswith(end)), 1.0)

    def table(self, tensor: StoredTensor, scale: float, packed: Linear | None = None) -> Table:
        """Build a table of embeddings, from the blocks of the head `packed` if the head has blocks."""
        kind = stored_kind(self._plain, tensor)
        if kind is None:
            kind, address = self._plain, self._packer.put(tensor.whole().to(self._dtype))  # C reads a row at a time
        elif packed is not None and packed.num_parts:
            address = packed.parts[0].weights
        else:
            address = self._packer.blocks(kind, tensor.addresses(), tensor.shape[1], tensor.name)
        # transformers rounds the scale to the weights' dtype.
        return Table(address, kind, tensor.shape[1], tensor.shape[0], torch.tensor(scale, dtype=self._dtype).item())

    def _qkv(self, names: Sequence[str], layer: Layer, kind: int) -> Linear:
        if self._architecture.gated_attention:
            return self._rows_of("", gated_rows(names, self._config), kind)
        if not self._architecture.qkv_by_head:
            return self.linear(names, kind=kind, input_factor=self._architecture.input_factor)
        head_dim, kv_heads = layer.key_dim, layer.num_kv_heads
        per_head = self._config.num_attention_heads // kv_heads
        rows = np.arange((per_head + 2) * kv_heads * head_dim).reshape(kv_heads, per_head + 2, head_dim)
        order = np.concatenate([rows[:, :per_head].ravel(), rows[:, per_head].ravel(), rows[:, per_head + 1].ravel()])
        bias = self._bias(names[0])
        matrix = _rows(self.tensor(f"{names[0]}.weight"), order)
        return self._pack([matrix], [None if bias is None else bias[torch.from_numpy(order)]], kind=kind)

    def _gate_up(self, names: Sequence[str]) -> Linear:
        if not self._architecture.gated:
            return self.linear(names)
        matrices = [self.tensor(f"{name}.weight") for name in names]
        if len(names) > 1:
            return self._linear(matrices, names, interleaved=True)
        bias = self._bias(names[0])
        return self._pack(_halves(matrices[0]), [None, None] if bias is None else list(bias.chunk(2)), interleaved=True)

    def _experts(self, start: str, experts: ExpertNames, kind: int) -> Any:
        """Return a pointer to the layer's experts; `kind` is the kind of their down projections."""
        names, make = self._source.names(), self._single_expert
        if self._architecture.tensors.stored(start + experts.whole[0], names) in names:
            make = self._whole_expert
        elif f"{start}{experts.stacked[0]}.weight" in names:
            make = self._stacked_expert
        parts = [make(start, experts, i, kind) for i in range(experts.count)]
        parts += self._shared_experts(start, experts, kind)
        gate_up = (Linear * len(parts))(*(part[0] for part in parts))
        down = (Linear * len(parts))(*(part[1] for part in parts))
        routers = [f"{start}{name}" for name in (experts.router, experts.shared_gate) if name is not None]
        correction = None
        if experts.correction is not None:
            correction = self._floats(start + experts.correction)
        own = [self._floats(start + name) for name in experts.own_norms]
        if own:  # the first norm has an additional factor
            whole = self.tensor(start + experts.own_norms[0]).whole().flatten() * self._config.hidden_size**-0.5
            own[0] = self._packer.put_floats(whole)
        norms = ("router_norm", "input_norm", "sum_norm", "beside_norm")
        struct = Experts(
            # Always keep the router in float32, because rounding must not change a token's experts.
            router=self._pack(
                [self.tensor(f"{name}.weight") for name in routers], list(map(self._bias, routers)), kind=WEIGHT_F32
            ),
            gate_up=gate_up,
            down=down,
            count=len(parts),
            chosen=experts.chosen + len(parts) - experts.count,
            normalised=experts.normalised,
            shared=len(parts) - experts.count,
            gated=experts.shared_gate is not None,
            sigmoid=experts.sigmoid,
            groups=experts.groups[0],
            best_groups=experts.groups[1],
            correction=correction,
            scales=None if experts.scales is None else self._floats(start + experts.scales),
            scale=experts.scale,
            jitter=experts.jitter,
            intermediate=experts.intermediate,
            **{name: Norm(address) for name, address in zip(norms, own, strict=False)},
        )
        self._kept_alive += [gate_up, down, struct]
        return ctypes.pointer(struct)

    def _shared_experts(self, start: str, experts: ExpertNames, kind: int) -> list[tuple[Linear, Linear]]:
        """Cut the shared expert into parts of the other experts' size; the sum of the parts is the whole."""
        size = experts.intermediate
        count = experts.shared_intermediate // size
        if not count:
            return []
        *inputs, down = (self.tensor(f"{start}{name}.weight") for name in experts.shared)
        *biases, last = (self._bias(start + name) for name in experts.shared)
        if self._architecture.gated and len(inputs) == 1:
            inputs, biases = _halves(inputs[0]), [None, None]
        linears = []
        for part in range(count):
            rows = np.arange(part * size, (part + 1) * size)
            columns = _columns(down, part * size, size)
            own = [None if bias is None else bias[part * size : (part + 1) * size] for bias in biases]
            inner = self._inner([_rows(matrix, rows) for matrix in inputs], own)
            linears.append((inner, self._pack([columns], [None if part else last], kind=kind)))
        return linears

    def _inner(self, matrices: Sequence[StoredTensor], biases: Sequence[torch.Tensor | None]) -> Linear:
        """Build an expert's gates and ups, or its ups if it has no gates."""
        return self._pack(matrices, biases, interleaved=len(matrices) == 2)

    def _single_expert(self, start: str, experts: ExpertNames, index: int, kind: int) -> tuple[Linear, Linear]:
        inner = (experts.intermediate, self._config.hidden_size)
        *inputs, down = (f"{start}{name.format(index)}.weight" for name in experts.single)
        matrices = [self.tensor(name, inner) for name in inputs]
        *biases, last = self._expert_biases(start, experts, index)
        outer = self.tensor(down, inner[::-1])
        return self._inner(matrices, biases), self._pack([outer], [last], kind=kind)

    def _stacked_expert(self, start: str, experts: ExpertNames, index: int, kind: int) -> tuple[Linear, Linear]:
        inner = (experts.count, experts.intermediate, self._config.hidden_size)
        outer = (experts.count, self._config.hidden_size, experts.intermediate)
        *inputs, down = (f"{start}{name}.weight" for name in experts.stacked)
        matrices = [self.tensor(name, inner).part(index) for name in inputs]
        *biases, last = self._expert_biases(start, experts, index)
        last_matrix = self.tensor(down, outer).part(index)
        return self._inner(matrices, biases), self._pack([last_matrix], [last], kind=kind)

    def _whole_expert(self, start: str, experts: ExpertNames, index: int, kind: int) -> tuple[Linear, Linear]:
        gate_up_name, down_name = (start + name for name in experts.whole)
        gate_up, down = self.tensor(gate_up_name).part(index), self.tensor(down_name).part(index)
        *halves, last = self._expert_biases(start, experts, index)
        if experts.transposed:
            turned = gate_up.whole().T
            gates = [_stored(turned[first::2]) for first in (0, 1)]
            down = _stored(down.whole().T)
        else:
            gates = _halves(gate_up) if self._architecture.gated else [gate_up]
        return self._inner(gates, halves), self._pack([down], [last], kind=kind)

    def _expert_biases(self, start: str, experts: ExpertNames, index: int) -> list[torch.Tensor | None]:
        """Return an expert's biases of gates, ups and downs from the tensors of all experts."""
        stacked = [f"{start}{name}.bias" for name in experts.stacked]
        if stacked[0] in self._source.names():
            sizes = [experts.intermediate] * (len(stacked) - 1) + [self._config.hidden_size]
            shaped = zip(stacked, sizes, strict=True)
            return [self.tensor(name, (experts.count, size)).whole()[index] for name, size in shaped]
        whole, down = (self._part_of_bias(start + name, index) for name in experts.whole)
        if whole is None:
            return [None] * (len(stacked) - 1) + [down]
        return [*((whole[0::2], whole[1::2]) if experts.transposed else whole.chunk(2)), down]

    def _part_of_bias(self, name: str, index: int) -> torch.Tensor | None:
        return self.tensor(f"{name}_bias").whole()[index] if f"{name}_bias" in self._shapes else None

    def _bias(self, name: str) -> torch.Tensor | None:
        return self.tensor(f"{name}.bias").whole() if f"{name}.bias" in self._shapes else None

    def _floats(self, name: str) -> int:
        return self._packer.put_floats(self.tensor(name).whole().flatten())

    def _head_norm(self, name: str, heads: int) -> Norm:
        kind = self._architecture.qk_norm
        if kind == NONE:
            return Norm()
        return self._norm([name.format(head) for head in range(heads)] if kind == PER_HEAD else [name])

    def _norm(self, names: Sequence[str]) -> Norm:
        weights = torch.cat([self.tensor(f"{name}.weight").whole().flatten() for name in names])
        biases = [self._bias(name) for name in names]
        plain = [bias for bias in biases if bias is not None]
        weight = self._packer.put_floats(weights + self._architecture.norm_offset)
        return Norm(weight, self._packer.put_floats(torch.cat(plain)) if plain else None)

    def _pack(
        self,
        matrices: Sequence[StoredTensor],
        biases: Sequence[torch.Tensor | None],
        *,
        interleaved: bool = False,
        group: int = _I8_GROUP,
        kind: int | None = None,
        factors: Sequence[torch.Tensor] | None = None,
    ) -> Linear:
        kind = self._kind if kind is None else kind
        linear = self._packer.linear(kind, matrices, group=group, interleaved=interleaved)
        if any(bias is not None for bias in biases):
            pairs = zip(biases, matrices, strict=True)
            full = [torch.zeros(matrix.shape[0]) if bias is None else bias for bias, matrix in pairs]
            bias = interleave_gate_up(*full) if interleaved else torch.cat(full)
            linear.bias = self._by_output(bias)
        if factors is not None and any(bool((factor != 1.0).any()) for factor in factors):
            linear.scales = self._by_output(interleave_gate_up(*factors) if interleaved else torch.cat(list(factors)))
        return linear

    def _by_output(self, values: torch.Tensor) -> int:
        """Return the address of a value for each output, padded to whole blocks."""
        return self._packer.put_floats(torch.nn.functional.pad(values, (0, -len(values) % COLUMNS)))


def is_tied(config: Any, source: WeightSource, loader: LayerLoader, architecture: Architecture) -> bool:
    """Return whether the head shares the embedding's weight. As in transformers, a different head in a file is used."""
    tensors = architecture.tensors
    head = tensors.stored(f"{tensors.head}.weight", source.names())
    if not config.tie_word_embeddings or head not in source.names():
        return bool(config.tie_word_embeddings)
    parts = loader.tensor(f"{tensors.head}.weight"), loader.tensor(f"{tensors.embedding}.weight")
    return parts[0].kind == parts[1].kind and np.array_equal(parts[0].rows, parts[1].rows)


def _order(parts: Sequence[range], count: int) -> np.ndarray:
    """Return the rows of the parts; all `count` rows if there are no parts."""
    return np.concatenate([np.arange(part.start, part.stop) for part in parts or (range(count),)])


def _heads_placed(gates: SomeRows, places: np.ndarray, size: int) -> SomeRows:
    """Return the gates' rows, `size` rows a head, in the order of the heads' outputs."""
    if np.array_equal(places, np.arange(len(places))):
        return gates
    rows = _order(gates.parts, len(places) * size).reshape(len(places), size)[np.argsort(places)]
    return SomeRows(gates.name, tuple(range(head[0], head[-1] + 1) for head in rows.tolist()))


def _rows(tensor: StoredTensor, order: np.ndarray) -> StoredTensor:
    """Return the rows `order` of a matrix."""
    in_file = order if tensor.row_order is None else tensor.row_order[order]
    return replace(tensor, shape=(len(order), *tensor.shape[1:]), row_order=in_file)


def _columns(tensor: StoredTensor, first: int, count: int) -> StoredTensor:
    """Return `count` columns of a matrix, from its own bytes if the columns are whole blocks."""
    from gguf.constants import GGMLQuantizationType  # here, because few models have such experts

    is_known = tensor.kind in CODE_KINDS or tensor.kind in GGMLQuantizationType.__members__
    start, size = (bytes_per_row(tensor.kind, n) if is_known else None for n in (first, count))
    if start is None or size is None:
        return _stored(tensor.whole()[:, first : first + count])
    return replace(tensor, shape=(tensor.shape[0], count), rows=tensor.rows[:, start : start + size])


def _halves(tensor: StoredTensor) -> list[StoredTensor]:
    """Return the upper and the lower half of a matrix."""
    rows = np.arange(tensor.shape[0])
    return [_rows(tensor, half) for half in np.split(rows, 2)]


def _stored(matrix: torch.Tensor) -> StoredTensor:
    """Wrap a float32 matrix in memory as a stored tensor."""
    plain = matrix.float().contiguous()
    return StoredTensor("", "F32", tuple(plain.shape), plain.view(torch.uint8).numpy())
