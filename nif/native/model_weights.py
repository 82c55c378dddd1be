"""ModelWeights: packs a model into the struct and the matrices for C, by its architecture's description."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, Any

from genbatch.nif.errors import ModelError, OptionError, TensorError
from genbatch.nif.host import available_cores
from genbatch.nif.models.architecture import (
    ACTIVATIONS,
    LINEAR_MODULES,
    Architecture,
    LayerEmbeddings,
    head_dim_of,
    heads_of,
    kv_sources,
    layer_bases,
    widest_mlp,
)
from genbatch.nif.models.architectures import DESCRIPTIONS, layer_shapes
from genbatch.nif.models.assistants import layers_read
from genbatch.nif.models.loaded_model import module_shape
from genbatch.nif.models.rope import RopeTables, rope_kinds
from genbatch.nif.native.build import NativeUnavailable
from genbatch.nif.native.kept_weights import keep_in_background, kept_place, open_weights
from genbatch.nif.native.library import (
    ALL_POSITIONS,
    COLUMNS,
    MAX_GROUPS,
    MAX_HEAD_DIM,
    MAX_ROPES,
    MAX_STREAMS,
    WEIGHT_BF16,
    WEIGHT_F32,
    WEIGHT_I8,
    WEIGHT_U4,
    Layer,
    Linear,
    ModelStruct,
    NativeArena,
    Pair,
    Table,
    native_library,
)
from genbatch.nif.runner import LayerGroup

if TYPE_CHECKING:  # these import torch, which a model with kept weights does not need
    from genbatch.nif.models.loaded_model import Model
    from genbatch.nif.native.layer_loader import LayerLoader


QUANTIZE = ("none", "int8", "int4")
"""The values of the option `quantize` for native runners."""

_HEAD_DIM_STEP = 16
MAX_EXPERT_GROUPS = 64


def check_supported(model: "Model") -> Architecture:
    """Check that the kernels support the model, and return its architecture.

    Raises:
        NativeUnavailable: the kernels lack a part; the reason names the part.
    """
    config: Any = model.config
    kind = module_shape(model).kind
    if kind not in DESCRIPTIONS:
        raise NativeUnavailable(f"{kind} is not one of the architectures that the kernels support")
    if model.device.type != "cpu":
        raise NativeUnavailable(f"the model is on {model.device}, not on the CPU")
    if model.dtype not in ("float32", "bfloat16"):
        raise NativeUnavailable(f"its weights are in {model.dtype}; the kernels take float32 and bfloat16")
    architecture = DESCRIPTIONS[kind](config)
    if architecture.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise NativeUnavailable(f"its activation is {architecture.activation}; the kernels compute {known}")
    attends = any(map(architecture.attends, range(config.num_hidden_layers)))
    for head_dim in {shape.key_dim for shape in layer_shapes(config) if shape.value_dim} if attends else ():
        if head_dim % _HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
            raise NativeUnavailable(
                f"it has heads of {head_dim} elements; the kernels take multiples of {_HEAD_DIM_STEP} up to "
                f"{MAX_HEAD_DIM}"
            )
    latent = architecture.latent
    if latent is not None and (latent.rank % _HEAD_DIM_STEP or latent.plain % _HEAD_DIM_STEP):
        sizes = f"{latent.rank} elements, by heads of {latent.plain}"
        raise NativeUnavailable(f"it has compressed keys of {sizes}; the kernels take multiples of {_HEAD_DIM_STEP}")
    if config.hidden_size % 2 or widest_mlp(config) % 2:
        raise NativeUnavailable("its hidden size or intermediate size is odd; the kernels take even sizes")
    experts = architecture.experts
    if experts is not None and not 1 <= experts.chosen <= experts.count:
        raise NativeUnavailable(f"a token takes {experts.chosen} of {experts.count} experts")
    if experts is not None and experts.shared_intermediate % experts.intermediate:
        sizes = f"{experts.shared_intermediate} in parts of {experts.intermediate}"
        raise NativeUnavailable(f"it has a shared expert of {sizes}, the size of the other experts")
    if experts is not None and (experts.groups[0] > MAX_EXPERT_GROUPS or experts.count % experts.groups[0]):
        raise NativeUnavailable(
            f"it has {experts.count} experts in {experts.groups[0]} groups; the kernels take equal groups, at most "
            f"{MAX_EXPERT_GROUPS}"
        )
    recurrence = architecture.recurrence
    if recurrence is not None and (recurrence.key_dim % 2 or recurrence.heads % recurrence.key_heads):
        sizes = f"{recurrence.heads} heads by {recurrence.key_heads} of {recurrence.key_dim} elements"
        raise NativeUnavailable(
            f"it has recurrent layers of {sizes}; the elements must be even, and key heads must divide the heads"
        )
    altup = architecture.altup
    if altup is not None and not 2 <= altup.streams <= MAX_STREAMS:
        raise NativeUnavailable(f"its residual has {altup.streams} streams; the kernels take 2 to {MAX_STREAMS}")
    if altup is not None and not 0 <= altup.active < altup.streams:
        raise NativeUnavailable(f"its active stream is {altup.active}, outside 0 to {altup.streams - 1}")
    if len(model.groups) > MAX_GROUPS:
        raise NativeUnavailable(f"it has {len(model.groups)} layer groups; the kernels take at most {MAX_GROUPS}")
    kinds = rope_kinds(config)
    if "dynamic" in kinds or len(kinds) > MAX_ROPES:
        raise NativeUnavailable(
            f"its rotary embeddings are {', '.join(kinds)}; the kernels take at most {MAX_ROPES}, and they "
            "must not change with the length"
        )
    if layer_bases(config) and set(kinds) != {"default"}:
        raise NativeUnavailable(f"its layers have different rotary bases and the scaling {kinds[0]}")
    if getattr(config, "use_bidirectional_attention", False) in (True, "all"):  # with "vision" only pictures' tokens do
        raise NativeUnavailable("its tokens attend to later tokens")
    assistant = architecture.assistant
    if assistant is not None and assistant.clusters and model.vocab_size % (COLUMNS * assistant.clusters):
        sizes = f"{assistant.clusters} clusters of {model.vocab_size} tokens"
        raise NativeUnavailable(f"it has {sizes}; the kernels take clusters of one size, a multiple of {COLUMNS}")
    if assistant is not None and assistant.chosen > assistant.clusters:
        raise NativeUnavailable(f"a row takes {assistant.chosen} of {assistant.clusters} clusters")
    if model.shape is None:
        _check_linears(model)
    return architecture


def _check_linears(model: "Model") -> None:
    """Raise NativeUnavailable if a linear of the model's module is of another class than torch's."""
    import torch

    for name, module in model.hf.named_modules():
        if isinstance(module, torch.nn.Linear) and not type(module).__module__.startswith(LINEAR_MODULES):
            raise NativeUnavailable(f"{name} is a {type(module).__name__}, not a plain torch.nn.Linear")


class ModelWeights:
    """The packed weights of a model; they live as long as this object.

    Args:
        model: a model that `load_model` returned.
        quantize: "none" keeps the model's dtype; `native_runner` describes "int8" and "int4".
        cache_bytes: most bytes of all models' packed weights on disk; 0 packs without the disk.
        mtp: whether to pack the MTP layer, too.

    Attributes:
        mtp_group: the index of the layer group with the keys of the MTP layer; None without an MTP layer.
        assistant: the packed weights of the model that predicts for this model; None without such a model.
        num_mapped: bytes that are mapped from a file; 0 if the weights were packed.
        keeping: the thread that writes the packed weights to the disk; None if no thread does.

    Raises:
        NativeUnavailable: the kernels cannot be built, or do not support this model.
        ModelError: the weights lack a tensor, or a tensor has NaN or an infinity.
        OptionError: `quantize` does not have this value, or the model has no MTP layer.
    """

    def __init__(self, model: "Model", quantize: str = "none", *, cache_bytes: int = 0, mtp: bool = False) -> None:
        if quantize not in QUANTIZE:
            raise OptionError("quantize", f"{quantize!r} is not one of {', '.join(QUANTIZE)}")
        self.architecture = architecture = check_supported(model)
        self.model = model
        self.library = native_library()
        self.quantize = quantize
        plain = WEIGHT_BF16 if model.dtype == "bfloat16" else WEIGHT_F32
        self.kind = plain if quantize == "none" else WEIGHT_I8
        config: Any = model.config
        sources = kv_sources(config)
        self.groups = tuple(_writers(group, sources) for group in model.groups)  # without layers that write no keys
        self.mtp_group = self._add_mtp(model, architecture) if mtp else None
        self.assistant: ModelWeights | None = None
        self.rope = RopeTables(config, partial=architecture.partial_rotary, max_position=model.max_position)
        self.predictor_rope = self.rope
        self.num_mapped = 0
        self.keeping: Thread | None = None
        self._kept_alive: list[Any] = []
        place = None
        if cache_bytes and model.identity:
            form = f"{model.dtype} {quantize}{' mtp' if mtp else ''}"
            place = kept_place(model.identity, form, self.library)
            kept = open_weights(place, self.library)
            if kept is not None:
                self.struct, self.num_mapped, self._kept_alive = kept.struct, kept.num_bytes, [kept]
                self.layers = ctypes.cast(self.struct.layers, ctypes.POINTER(Layer * config.num_hidden_layers)).contents
                return
        try:
            arena = self._pack(model, architecture, plain, WEIGHT_U4 if quantize == "int4" else self.kind)
        except TensorError as fault:
            raise ModelError(model.name, str(fault)) from fault
        if place is not None:
            self.keeping = keep_in_background(place, self.struct, arena, self.library, cache_bytes)

    def _pack(self, model: "Model", architecture: Architecture, plain: int, matrices: int) -> NativeArena:
        """Pack the weights from the model's files; returns their memory."""
        from genbatch.nif.models.weight_source import ModuleWeights
        from genbatch.nif.native.layer_loader import LayerLoader, is_tied
        from genbatch.nif.native.weights import WeightPacker

        config: Any = model.config
        source = model.weights or ModuleWeights(model.hf)
        packer = WeightPacker(self.library, available_cores())
        loader = LayerLoader(model, architecture, source, packer, matrices)
        self._kept_alive.append(loader)
        self.layers = layers = (Layer * config.num_hidden_layers)()
        for layer in range(len(layers)):
            layers[layer] = loader.layer(layer)
            layers[layer].rope = rope = self._rope_of(layer, architecture)
            layers[layer].rotary_dim = 0 if rope < 0 else self.rope.rotary_dims[rope]
            source.release()  # otherwise the file's pages would stay in memory with the packed weights
        self._group_layers(model.groups, kv_sources(config))
        tensors, assistant = architecture.tensors, architecture.assistant
        tied = model.weights is not None and is_tied(config, source, loader, architecture)
        table, head, clusters = self._tables(loader, architecture, tied=tied)
        own, altup = architecture.layer_embeddings, architecture.altup
        inner = [*map(_inner_size, layers), 0 if own is None else own.width]
        inner += [layer.altup.contents.left.n for layer in layers if layer.altup]
        self.struct = ModelStruct(
            hidden=config.hidden_size,
            intermediate=max(inner),
            num_heads=heads_of(config),
            num_layers=len(layers),
            vocab_size=model.vocab_size,
            num_groups=len(self.groups),
            norm_kind=int(architecture.layer_norm),
            qk_norm=architecture.qk_norm,
            activation=ACTIVATIONS[architecture.activation],
            gated=architecture.gated,
            parallel=architecture.parallel,
            interleaved=architecture.interleaved,
            norms_rotated=architecture.norms_rotated,
            num_ropes=len(self.rope.kinds),
            head_gates=head_dim_of(config) if architecture.gated_attention else int(architecture.head_gated),
            norm_eps=architecture.norm_eps,
            score_scale=architecture.score_scale,
            score_cap=architecture.score_cap,
            logit_cap=architecture.logit_cap,
            residual_scale=architecture.residual_scale,
            logit_divisor=architecture.logit_divisor,
            gate_slope=architecture.gate_slope,
            gate_limit=architecture.gate_limit,
            embedding=table,
            embedding_norm=loader.norm(tensors.embedding_norm),
            final_norm=loader.norm(tensors.final_norm),
            layers=layers,
            pair=None if assistant is None else loader.pair(assistant),
            clusters=clusters,
            writes=assistant is None,
            head=head,
        )
        if own is not None:
            self._layer_embeddings(loader, own)
        if altup is not None:
            self.struct.num_streams, self.struct.active_stream = altup.streams, altup.active
            self.struct.split = loader.linear([altup.split.format(stream) for stream in range(altup.streams - 1)])
            self.struct.merge = loader.merges(altup)
        if self.mtp_group is not None:
            self.struct.predictor = ctypes.pointer(self._mtp(loader, architecture))
        source.release()
        return packer.arena

    def _tables(self, loader: "LayerLoader", architecture: Architecture, *, tied: bool) -> tuple[Table, Linear, Any]:
        """Pack the embeddings and the head, and the head's clusters of tokens if it has clusters."""
        from genbatch.nif.native.layer_loader import I8_HEAD_GROUP

        tensors, assistant = architecture.tensors, architecture.assistant
        embedding = loader.tensor(f"{tensors.embedding}.weight")
        head_name, clusters = tensors.embedding if tied else tensors.head, None
        # With int4 the head has 8 bits, because it decides between near ties.
        if assistant is not None and assistant.clusters:
            head, clusters = loader.clustered(head_name, assistant, I8_HEAD_GROUP, self.kind)
        else:
            head = loader.linear([head_name], I8_HEAD_GROUP, self.kind)
        if assistant is not None:
            return Table(), head, clusters  # an assistant reads the embeddings of the other model
        return loader.table(embedding, architecture.embedding_scale, head if tied else None), head, clusters

    def _add_mtp(self, model: "Model", architecture: Architecture) -> int:
        """Add the MTP layer after the layers of its group; return the group's index.

        Raises:
            OptionError: the model has no MTP layer that the kernels compute.
        """
        names = architecture.mtp
        if names is None:
            raise OptionError("draft", f"multi-token heads (MTP) are not supported for the family of {model.name}")
        if model.weights is None or f"{names.input}.weight" not in model.weights.names():
            raise OptionError("draft", f"the files of {model.name} have no multi-token head (MTP): {names.input}")
        last = _last_attending(model, architecture)
        group_id = next(i for i, group in enumerate(self.groups) if last in group.layers and not group.recurs)
        group = self.groups[group_id]
        extended = replace(group, layers=(*group.layers, model.config.num_hidden_layers))
        self.groups = (*self.groups[:group_id], extended, *self.groups[group_id + 1 :])
        return group_id

    def _mtp(self, loader: "LayerLoader", architecture: Architecture) -> ModelStruct:
        """Build the model of the MTP layer: this model with another input, only this layer, and another norm."""
        assert architecture.mtp is not None and self.mtp_group is not None, "the layer has a group"
        last, group = _last_attending(self.model, architecture), self.groups[self.mtp_group]
        layer, pair, final_norm = loader.mtp(architecture.mtp, last)
        layer.rope, layer.rotary_dim = self.layers[last].rope, self.layers[last].rotary_dim
        layer.group, layer.window = self.mtp_group, self.layers[last].window
        layer.index_in_group = len(group.layers) - 1
        pair.embedding = self.struct.embedding
        predictor = ModelStruct.from_buffer_copy(self.struct)
        predictor.num_layers, predictor.layers, predictor.final_norm = 1, ctypes.pointer(layer), final_norm
        predictor.pair, predictor.intermediate = ctypes.pointer(pair), _inner_size(layer)
        self._kept_alive += [layer, pair, predictor]
        return predictor

    def add_assistant(self, assistant: "ModelWeights") -> None:
        """Let another model predict for this one; its layers read this model's keys and values.

        Raises:
            OptionError: the other model was not trained for this model.
        """
        read = layers_read(assistant.model, self.model)
        layers = type(assistant.layers).from_buffer_copy(assistant.layers)
        for layer, source in zip(layers, read, strict=True):
            theirs = self.layers[source]
            layer.group, layer.index_in_group, layer.window = theirs.group, theirs.index_in_group, theirs.window
            layer.shares = True
        groups = {layer.group for layer in layers}
        # The assistant needs one key more than the model's next position: all keys of the newest position.
        self.groups = tuple(
            replace(group, window=group.window + 1) if index in groups and group.window is not None else group
            for index, group in enumerate(self.groups)
        )
        # Copy the structs, because a thread may be writing the packed weights of either model to the disk.
        pair = Pair.from_buffer_copy(assistant.struct.pair.contents)
        pair.embedding = self.struct.embedding
        predictor = ModelStruct.from_buffer_copy(assistant.struct)
        predictor.layers, predictor.pair = ctypes.cast(layers, ctypes.POINTER(Layer)), ctypes.pointer(pair)
        predictor.num_groups = len(self.groups)
        self.struct = ModelStruct.from_buffer_copy(self.struct)
        self.struct.predictor = ctypes.pointer(predictor)
        self._kept_alive += [layers, pair, predictor]
        self.predictor_rope = RopeTables(
            assistant.model.config, partial=assistant.architecture.partial_rotary, max_position=self.model.max_position
        )
        self.num_mapped += assistant.num_mapped
        self.assistant = assistant

    def _group_layers(self, groups: Sequence[LayerGroup], sources: dict[int, int]) -> None:
        """Set each layer's place in its group; `sources` is the result of `kv_sources`."""
        layers = self.layers
        for group_id, group in enumerate(groups):
            writers = self.groups[group_id].layers
            for layer in group.layers:
                if group.recurs:
                    state = layers[layer % len(layers)].recurrence.contents
                    state.group, state.index_in_group = group_id, writers.index(layer)
                    continue
                layers[layer].group = group_id
                layers[layer].window = ALL_POSITIONS if group.window is None else group.window
                layers[layer].index_in_group = writers.index(sources.get(layer, layer))
                layers[layer].shares, layers[layer].sink_tokens = layer in sources, group.sink_tokens

    def _layer_embeddings(self, loader: "LayerLoader", names: LayerEmbeddings) -> None:
        struct, width = self.struct, names.width
        struct.layer_width = width
        struct.layer_embedding = loader.table(loader.tensor(f"{names.table}.weight"), width**0.5)
        struct.inputs, struct.inputs_norm = loader.linear([names.projection[0]]), loader.norm(names.projection[1])
        struct.inputs_scale, struct.joined_scale = struct.hidden**-0.5, 2**-0.5

    def _rope_of(self, layer: int, architecture: Architecture) -> int:
        """Return the index of a layer's rotary table; -1 for a layer without one."""
        if layer in architecture.no_rope or not architecture.attends(layer):
            return -1
        config: Any = self.model.config
        if len(self.rope.kinds) == 1:
            return 0
        own = config.layer_rope_theta if layer_bases(config) else config.layer_types
        return self.rope.kinds.index(own[layer])


def _last_attending(model: "Model", architecture: Architecture) -> int:
    return max(filter(architecture.attends, range(model.config.num_hidden_layers)))


def _inner_size(layer: Layer) -> int:
    return int(max(layer.intermediate, layer.experts.contents.intermediate if layer.experts else 0))


def _writers(group: LayerGroup, sources: dict[int, int]) -> LayerGroup:
    """Return the group without the layers that read other layers' keys and values."""
    return replace(group, layers=tuple(layer for layer in group.layers if layer not in sources))
