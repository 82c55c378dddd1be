"""Architecture: describes one model's architecture to the C kernels and the loader, as data.

Neither the kernels nor the loader has a branch for an architecture. They read the places of the norms, the activation
and the tensors' names from the description. nif/native/README.md explains how to add an architecture.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NONE, SHARED, PER_HEAD, WHOLE = range(4)
"""Norms of queries and keys, as `enum qk_norm`: no norm; a norm of each head, with shared weights or with weights for
each head; one norm over all heads."""

ACTIVATIONS = {
    "silu": 0,
    "swish": 0,
    "gelu": 1,
    "gelu_new": 2,
    "gelu_pytorch_tanh": 2,
    "relu2": 3,
    "clamped_swiglu": 4,
    "xielu": 5,
}
"""transformers' names of activations, as `enum activation`."""

LINEAR_MODULES = ("torch.nn.", "transformers.models.")
"""Modules with classes of linears that only multiply by a matrix. transformers has some, for routers."""

RECURRENT_KINDS = ("linear_attention", "mamba")
"""transformers' `layer_types` with a recurrent state."""

BOTH = "hybrid"
"""transformers' `layer_types` with attention and a recurrent state."""

KEEP_NOTHING = ("mlp", "moe")
"""transformers' `layer_types` that store nothing of earlier positions."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors' names, without ".weight" and ".bias"; None means that the model has no such tensor.

    Args:
        layer: the prefix of a layer's names; {} is the layer's number.
        qkv: queries, keys and values, then the heads' gates if the layer has them; or one tensor for the first three.
        gate_up: gates and ups, or one tensor for both; only ups if the MLP has no gates.
        attention_norm, mlp_norm: the norms of the inputs.
        attention_post, mlp_post: the norms of the outputs, before they are added to the residual.
        scale: a number that multiplies a layer's output.
        xielu: the four numbers of "xielu": for squares, exponentials and the linear part, and the threshold.
        in_files: parts of transformers' names, each with the spelling in files.
    """

    embedding: str = "model.embed_tokens"
    embedding_norm: str | None = None
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    attention_post: str | None = None
    mlp_post: str | None = None
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str | None = None
    scale: str | None = None
    xielu: tuple[str, str, str, str] | None = None
    in_files: tuple[tuple[str, str], ...] = ()

    def stored(self, name: str, names: Collection[str]) -> str:
        """Return a tensor's name in a source with these names; `name` itself if the source has no other spelling."""
        renamed = (name.replace(part, written) for part, written in self.in_files)
        return next((other for other in renamed if name not in names and other in names), name)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A mixture of experts instead of the MLP.

    Args:
        count: experts of a layer.
        chosen: experts that a token uses.
        intermediate: an expert's inner size.
        normalised: whether the weights of a token's experts sum to 1.
        router: name of the router.
        whole: names of two tensors for all experts, [experts, outputs, inputs]: gates with ups, and downs.
        single: names of one expert's gates (if experts have gates), ups and downs; {} is the expert's number.
        stacked: names of all experts' gates (if experts have gates), ups and downs. A source has one of three forms.
        transposed: whether `whole` is [experts, inputs, outputs], where gates and ups alternate.
        layers: the layers with experts; None means all layers.
        shared: names of gates, ups and downs of the shared expert, which every token uses. These are two names if one
            tensor has gates and ups, or if the expert has no gates.
        shared_intermediate: the shared expert's inner size; 0 means that there is no shared expert.
        shared_gate: name of the row for the shared expert's weight, a sigmoid; None means a weight of 1.
        sigmoid: whether an expert's weight is the sigmoid of its score; else it is a softmax over all scores.
        correction: name of the addend to the weights while experts are chosen.
        scale: the factor of the chosen experts' weights.
        jitter: if not 0, experts are chosen one after another. Each chosen expert's weight is a softmax over the scores
            that are left and within twice `jitter` of the expert's score.
        groups: the number of groups of experts, and the number of groups from which a token's experts come.
        scales: name of the factors of the experts' weights.
        own_norms: names of four norms: of the router's input (without ".weight"; times hidden_size ** -0.5), of the
            experts' input, of the experts' sum, and of the output of the MLP beside the experts. If empty, there is no
            MLP beside the experts, and router and experts read the input of an MLP.
    """

    count: int
    chosen: int
    intermediate: int
    normalised: bool = True
    router: str = "mlp.gate"
    whole: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    single: tuple[str, ...] = (
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    )
    stacked: tuple[str, ...] = ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
    transposed: bool = False
    layers: frozenset[int] | None = None
    shared: tuple[str, ...] = ()
    shared_intermediate: int = 0
    shared_gate: str | None = None
    sigmoid: bool = False
    correction: str | None = None
    scale: float = 1.0
    jitter: float = 0.0
    groups: tuple[int, int] = (1, 1)
    scales: str | None = None
    own_norms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConvolutionNames:
    """Short convolutions instead of attention in some layers.

    Such a layer computes a gate, a factor and an input for each token. The products of gate and input go through a
    causal depthwise convolution and are multiplied by the factor.

    Args:
        layers: the layers with a convolution.
        inputs: name of the linear of gates, factors and inputs.
        taps: name of the convolution.
        out: name of the last linear.
    """

    layers: frozenset[int]
    inputs: str = "conv.in_proj"
    taps: str = "conv.conv"
    out: str = "conv.out_proj"


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Multi-head latent attention (MLA): one row of a token, its latent, gives the keys and values of all heads.

    The cache stores only latents. A head's query is projected to the latent's space and compared with the latents. So
    the keys and values of a head are never computed.

    Args:
        rank: elements of the latent.
        rotated: rotated elements of a key, which all heads share.
        plain: the other elements of a head's query.
        value_dim: elements of a head's value.
        query_rank: elements of the queries' latent; 0 means that the queries are projected from the layer's input.
        eps: epsilon of the norms of both latents.
        query: names of the linear to the queries' latent, of its norm, and of the linear to the queries.
        queries: name of the linear to the queries if these have no latent.
        latent: names of the linear to the latent and the rotated elements, and of the latent's norm.
        keys_values: name of the linear from a latent to each head's key and value.
        keys, values: names of two tensors with a matrix for each head: [heads, rank, plain] and [heads, value_dim,
            rank]. A source has one of the two forms.
    """

    rank: int
    rotated: int
    plain: int
    value_dim: int
    query_rank: int = 0
    eps: float = 1e-6
    query: tuple[str, str, str] = ("self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj")
    queries: str = "self_attn.q_proj"
    latent: tuple[str, str] = ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm")
    keys_values: str = "self_attn.kv_b_proj"
    keys: str = "self_attn.k_b_proj"
    values: str = "self_attn.v_b_proj"


@dataclass(frozen=True, slots=True)
class LayerEmbeddings:
    """Embeddings of each token for each layer.

    Such an embedding is the sum of a table's row and a projection of the token's usual embedding. A layer projects its
    output to this width through a gate, multiplies it by the embedding, projects the product back and adds it.

    Args:
        width: elements of one layer's embedding.
        table: name of the table of all layers' embeddings.
        projection: names of the linear from usual embeddings, and of the norm after the linear.
        gate, back, post: names of a layer's two linears, and of the norm after them.
    """

    width: int
    table: str = "model.embed_tokens_per_layer"
    projection: tuple[str, str] = ("model.per_layer_model_projection", "model.per_layer_projection_norm")
    gate: str = "per_layer_input_gate"
    back: str = "per_layer_projection"
    post: str = "post_per_layer_input_norm"


@dataclass(frozen=True, slots=True)
class AltUpNames:
    """Alternating updates (AltUp): the residual has several streams; a layer computes one stream and corrects all.

    A product of low rank (LAuReL) runs beside attention.

    Args:
        streams: the number of streams.
        active: the stream that layers compute.
        split: name of the linear from an embedding to stream {} + 1.
        merge: name of the linear from the last layer's stream {} + 1 to an addend of the average.
        router: names of the norm and of the linear that give a row's routes.
        predict, correct: names of the linears from routes to the coefficients of streams.
        output_scale: name of the active stream's factors before the layer's embedding is applied; None means 1.
        laurel: names of the linears to the low rank and back, and of the norm after them.
    """

    streams: int
    active: int
    split: str = "model.altup_projections.{}"
    merge: str = "model.altup_unembed_projections.{}"
    router: tuple[str, str] = ("altup.router_norm", "altup.modality_router")
    predict: str = "altup.prediction_coefs"
    correct: str = "altup.correction_coefs"
    output_scale: str | None = "altup.correct_output_scale"
    laurel: tuple[str, str, str] = ("laurel.linear_left", "laurel.linear_right", "laurel.post_laurel_norm")


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Multi-token prediction (MTP): one more layer, which guesses the token after the one that the model draws.

    The layer reads a token's embedding, and the input of the model's head at the position before. It has the form of
    the model's last attention layer, and shares the model's head.

    Args:
        layer: the prefix of the layer's names.
        input: name of the linear from embedding and row to the layer's input.
        norms: names of the norms of the embedding and of the row.
        final_norm: name of the norm in front of the head.
    """

    layer: str = "mtp.layers.0."
    input: str = "mtp.fc"
    norms: tuple[str, str] = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    final_norm: str = "mtp.norm"


def nextn(config: Any) -> MtpNames:
    """Return the names of an MTP layer to which files give the number after the last layer's (DeepSeek, GLM)."""
    start = f"model.layers.{config.num_hidden_layers}."
    return MtpNames(start, f"{start}eh_proj", (f"{start}enorm", f"{start}hnorm"), f"{start}shared_head.norm")


@dataclass(frozen=True, slots=True)
class AssistantNames:
    """Names and sizes of an assistant, which guesses tokens for another model.

    The assistant's layers have no keys and values: they read those of the other model.

    Args:
        hidden_size: the other model's hidden size.
        clusters: the number of clusters of tokens in the head; 0 means that every token gets a logit.
        chosen: the number of clusters that a row chooses; only their tokens get logits.
        input: name of the linear from a token's embedding and the other model's row to the assistant's row.
        output: name of the linear from the head's input to the row for the next guess.
        centroids: name of the linear that gives each cluster's score.
        ordering: name of the tensor of all tokens, cluster by cluster.
    """

    hidden_size: int
    clusters: int = 0
    chosen: int = 0
    input: str = "pre_projection"
    output: str = "post_projection"
    centroids: str = "masked_embedding.centroids"
    ordering: str = "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True)
class SomeRows:
    """Some rows of a tensor.

    Args:
        name: the tensor's name.
        parts: ranges of rows, in this order; empty means all rows.
        factors: a factor for each part's products and biases; empty means 1.
    """

    name: str
    parts: tuple[range, ...] = ()
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RecurrenceNames:
    """Recurrent layers (gated delta nets or Mamba 2) instead of some layers' attention, or beside it.

    Each head has a state, a matrix of keys by values. A token decays the state, adds a product of its key and value,
    and multiplies the state by its query. A short convolution and SiLU give queries, keys and values, which Mamba 2
    calls C, B and x.

    Args:
        layers: the layers with a recurrence.
        inputs: linears for queries, keys, values, steps, strengths (if `corrects`) and gates, in this order.
        channels: the convolution's channels of queries, keys and values; empty means that they lie in this order.
        heads: heads of values.
        key_heads: heads of queries and keys.
        key_dim, value_dim: elements of a head.
        kernel: taps of the convolution.
        norm_groups: groups of outputs, each with a separate norm.
        corrects: whether a token adds the difference of its value and the state's value for its key (the delta rule).
        gate_first: whether the gate multiplies before the norm.
        start: the prefix of the other tensors' names.
        skip: name of the factors of values that are added to the outputs past the state; None means no such factors.
        norm: name of the norm of outputs; None means no norm.
        gate_eps: epsilon of that norm; None means the other norms' epsilon.
        strength: factor of the sigmoid of a strength.
        out: name of the last linear.
        input_factor: factor of the products of `inputs`.
        layer: the other tensors' names in such a layer; None means the names of the other layers.
    """

    layers: frozenset[int]
    inputs: tuple[SomeRows, ...]
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm_groups: int
    channels: tuple[range, ...] = ()
    corrects: bool = True
    gate_first: bool = False
    start: str = "linear_attn."
    skip: str | None = None
    norm: str | None = "norm"
    gate_eps: float | None = None
    strength: float = 1.0
    out: str = "out_proj"
    input_factor: float = 1.0
    layer: Tensors | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model's architecture, with all numbers resolved.

    Args:
        norm_eps: epsilon of every norm.
        score_scale: factor of queries.
        activation: a name of `ACTIVATIONS`.
        tensors: the tensors' names.
        layer_norm: whether norms subtract the mean; else they are RMS norms.
        norm_offset: addend to the weights of norms; 1 if files have the weights less 1.
        qk_norm: NONE, SHARED, PER_HEAD or WHOLE.
        norms_rotated: whether norms of queries and keys come after the rotation.
        qkv_by_head: whether the one tensor of `qkv` has, for one KV head after another, its queries, key and value.
        gated: whether the MLP multiplies its activations with ups.
        parallel: whether the MLP has the same input as attention.
        partial_rotary: whether the rotary embedding rotates only the configuration's share of a head.
        interleaved: whether the rotary embedding rotates neighbours; else it rotates halves.
        no_rope: layers without a rotary embedding.
        score_cap, logit_cap: x becomes cap * tanh(x / cap); 0 means no cap.
        embedding_scale, residual_scale: factors of a token's embedding, and of the addends of the residual.
        logit_divisor: divisor of the logits.
        gate_slope, gate_limit: the parameters of "clamped_swiglu".
        experts: None if every layer has one MLP.
        convolution: None if no layer is a short convolution.
        recurrence: None if no layer has a recurrent state.
        latent: None if each head has separate keys and values.
        gated_attention: whether gates follow each head's queries; their sigmoid multiplies the head's output.
        head_gated: whether the last linear of `qkv` gives each head one such gate.
        value_norm: whether the values of each head are normed, without weights.
        layer_embeddings: None if only the first layer reads an embedding.
        altup: None if the residual is one stream.
        sparse: by layer, the standard deviations above their mean from which gates count; other layers use all gates.
        attending: the layers with attention; None means the layers without convolution and recurrence.
        mlps: the layers with an MLP or experts; None means all layers.
        factors: factors of a linear's products and bias, by the end of its name.
        input_factor: factor of the products of queries, keys and values.
        mtp: the names of the MTP layer, which a file may have; None if it is not computed.
        assistant: names and sizes of an assistant; None if the model is no assistant.
    """

    norm_eps: float
    score_scale: float
    activation: str
    tensors: Tensors = field(default_factory=Tensors)
    layer_norm: bool = False
    norm_offset: float = 0.0
    qk_norm: int = NONE
    norms_rotated: bool = False
    qkv_by_head: bool = False
    gated: bool = True
    parallel: bool = False
    partial_rotary: bool = False
    interleaved: bool = False
    no_rope: frozenset[int] = frozenset()
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    gate_slope: float = 0.0
    gate_limit: float = 0.0
    experts: ExpertNames | None = None
    convolution: ConvolutionNames | None = None
    recurrence: RecurrenceNames | None = None
    latent: LatentNames | None = None
    gated_attention: bool = False
    head_gated: bool = False
    value_norm: bool = False
    layer_embeddings: LayerEmbeddings | None = None
    altup: AltUpNames | None = None
    sparse: Mapping[int, float] = field(default_factory=dict)
    attending: frozenset[int] | None = None
    mlps: frozenset[int] | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    input_factor: float = 1.0
    mtp: MtpNames | None = None
    assistant: AssistantNames | None = None

    def attends(self, layer: int) -> bool:
        """Return whether a layer attends."""
        if self.attending is not None:
            return layer in self.attending
        others = (self.convolution, self.recurrence)
        return not any(other is not None and layer in other.layers for other in others)

    def tensors_of(self, layer: int) -> Tensors:
        """Return the names of a layer's tensors."""
        recurrence = self.recurrence
        own = recurrence.layer if recurrence is not None and layer in recurrence.layers else None
        return own or self.tensors


def has_alpha(rope: Mapping[str, Any]) -> bool:
    """Return whether a rotary embedding of the type "dynamic" has a fixed factor of its base (Hunyuan)."""
    return rope.get("rope_type") == "dynamic" and bool(rope.get("alpha"))


def heads_of(config: Any) -> int:
    """Return the number of heads; 1 for a model that does not attend."""
    heads: int = getattr(config, "num_attention_heads", 1)
    return heads


def kv_heads_of(config: Any) -> int:
    """Return the number of KV heads."""
    heads: int = getattr(config, "num_key_value_heads", None) or heads_of(config)
    return heads


def head_dim_of(config: Any) -> int:
    """Return the number of elements of a head."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads_of(config)
    return size


def read_whole(config: Any) -> None:
    """Let a configuration return the common value of settings that differ among layers; see also `shapes_of`."""
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "is_heterogeneous", False):
            part.allow_global_per_layer_attribute_access = True


def shapes_of(config: Any) -> list[tuple[int, int]]:
    """Return each layer's number of KV heads and elements of a head."""
    heads, size = kv_heads_of(config), head_dim_of(config)
    shapes = [(heads, size)] * config.num_hidden_layers
    if getattr(config, "is_heterogeneous", False):
        for layer, own in config.to_dict()["per_layer_config"].items():
            shapes[int(layer)] = own.get("num_key_value_heads", heads), own.get("head_dim", size)
    return shapes


def layer_bases(config: Any) -> tuple[float, ...]:
    """Return the distinct rotary bases of layers; empty if all layers have the configuration's usual base."""
    bases = sorted({base for base in getattr(config, "layer_rope_theta", None) or () if base})
    return tuple(bases) if bases and bases != [config.rope_parameters["rope_theta"]] else ()


def kv_sources(config: Any) -> dict[int, int]:
    """Map each layer that writes no keys and values to the earlier layer from which it reads them.

    An assistant's layers read another model's keys and values, so they are not in the map.
    """
    last: dict[str, int] = {}
    sources: dict[int, int] = {}
    for layer, mode in enumerate(getattr(config, "kv_sharing_modes", None) or ()):
        if mode == "reuse":
            if (source := last.get(config.layer_types[layer])) is not None:
                sources[layer] = source
        else:
            last[config.layer_types[layer]] = layer
    return sources


def qkv_names(names: Sequence[str], tensors: Collection[str]) -> Sequence[str]:
    """Return a layer's linears of queries, keys and values, by the tensors of its module.

    A layer without keys has only queries, because it reads another layer's keys. Keys without values are values, too.
    """
    if len(names) == 1 or f"{names[1]}.weight" not in tensors:
        return names[:1]
    queries, keys, values, *gates = names
    return queries, keys, values if f"{values}.weight" in tensors else keys, *gates


def latent_rows(names: LatentNames) -> tuple[SomeRows, SomeRows]:
    """Return the rows of queries (or of the queries' latent), then those of a key's rotated elements and the latent."""
    order = (range(names.rank, names.rank + names.rotated), range(names.rank))
    return SomeRows(names.query[0] if names.query_rank else names.queries), SomeRows(names.latent[0], order)


def gated_rows(names: Sequence[str], config: Any) -> tuple[SomeRows, ...]:
    """Return the rows of queries, keys, values and gates of linears in which gates follow each head's queries."""
    head_dim = head_dim_of(config)
    starts = range(0, 2 * config.num_attention_heads * head_dim, 2 * head_dim)
    queries = tuple(range(start, start + head_dim) for start in starts)
    gates = tuple(range(start + head_dim, start + 2 * head_dim) for start in starts)
    both, keys, values = names
    return SomeRows(both, queries), SomeRows(keys), SomeRows(values), SomeRows(both, gates)


def widest_mlp(config: Any) -> int:
    """Return the inner size of the widest MLP of any layer."""
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widest: int = max(size) if isinstance(size, list | tuple) else size
    return widest * 2 if getattr(config, "use_double_wide_mlp", False) else widest
