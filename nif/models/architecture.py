"""Architecture: describes one model's architecture to the C kernels and the loader, as data.

Neither the kernels nor the loader has a branch for any architecture. They read the places of the norms, the activation
and the tensors' names from the description. nif/native/README.md tells how to add an architecture.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NONE, SHARED, PER_HEAD, WHOLE = range(4)
"""Norms of queries and keys, as `enum qk_norm`: none, each head by the same weights, by its own, all heads as one."""

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
"""Where linears are defined that multiply by a matrix and do nothing else; a router may be one of transformers'."""

RECURRENT_KINDS = ("linear_attention", "mamba")
"""transformers' `layer_types` that keep a state."""

BOTH = "hybrid"
"""transformers' `layer_types` that attend and keep a state."""

KEEP_NOTHING = ("mlp", "moe")
"""transformers' `layer_types` that keep nothing of earlier positions."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors' names, without ".weight" and ".bias"; None means that the model has no such tensor.

    Args:
        layer: the beginning of a layer's names; {} is its number.
        qkv: queries, keys and values, and the heads' gates if there are any; or one tensor of the first three.
        gate_up: gates and ups, or one tensor of both; without gates the ups alone.
        attention_norm, mlp_norm: of what goes in.
        attention_post, mlp_post: of what comes out, before it is added to the residual.
        scale: of one number that multiplies what a layer gives.
        xielu: of the four numbers of "xielu": of squares, of exponentials, of the straight part, and the threshold.
        in_files: parts of transformers' names and what files have in their place.
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
        """Return a tensor's name in a source with these names; the given name if the source has no other."""
        renamed = (name.replace(part, written) for part, written in self.in_files)
        return next((other for other in renamed if name not in names and other in names), name)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A mixture of experts in the place of the MLP.

    Args:
        count: experts of a layer.
        chosen: how many a token takes.
        intermediate: inner size of one.
        normalised: whether the weights of those chosen sum to 1.
        router: name of the router.
        whole: names of gates and ups, and of downs, of all experts in one tensor each, [experts, outputs, inputs].
        single: names of one expert's gates (if there are any), ups and downs; {} is its number.
        stacked: the same of all experts. A source has one of the three forms.
        transposed: whether `whole` is [experts, inputs, outputs], gates and ups taking turns.
        layers: the layers that have experts; None: all.
        shared: names of gates, ups and downs of the expert that every token takes; two where one has gates and ups, or
            there are no gates.
        shared_intermediate: inner size of that one; 0: there is none.
        shared_gate: name of the row whose sigmoid is its weight; None: it weighs 1.
        sigmoid: whether an expert's weight is the sigmoid of its score, and not its share of all.
        correction: name of what is added to the weights while experts are chosen.
        scale: of the weights of those chosen.
        jitter: if not 0, experts are chosen one after another, each with a share of the scores that are left and lie
            within twice this of it.
        groups: groups of experts, and how many of them a token's experts come from.
        scales: name of what multiplies each expert's weight.
        own_norms: names of the norms of what the router reads (without ".weight"; times hidden_size ** -0.5), of what
            the experts read, of their sum, and of what the MLP beside them gives; empty: there is no MLP beside them,
            and router and experts read what an MLP would.
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
    """Short convolutions in the place of some layers' attention.

    Such a layer makes a gate, a factor and an input of each token. The products of gate and input go through a causal
    convolution, each channel by itself, and are multiplied by the factor.

    Args:
        layers: the layers that have one.
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
    """Keys and values of all heads made of one row of a token, its latent, which is all that the cache keeps (MLA).

    A head's query is brought to the latent's form and meets the latents themselves. So no key and no value of a head
    is ever computed.

    Args:
        rank: elements of the latent.
        rotated: elements of a key that are rotated; all heads share them.
        plain: the other elements of a head's query.
        value_dim: elements of a head's value.
        query_rank: elements of the row that the queries are made of; 0: they are made of the layer's input.
        eps: of the norms of both rows.
        query: names of the linear to that row, of its norm, and of the linear to the queries.
        queries: name of the linear to the queries where there is no such row.
        latent: names of the linear to the latent and what is rotated, and of the latent's norm.
        keys_values: name of the linear from a latent to each head's key and value.
        keys, values: names of the same as one matrix for each head: [heads, rank, plain] and [heads, value_dim, rank].
            A source has one of the two forms.
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

    They are the sum of a table's row and a projection of the token's usual embedding. A layer gates its output into
    their width, multiplies it by its embedding, and adds what is projected back.

    Args:
        width: of one layer's embedding.
        table: name of the table of all layers' embeddings.
        projection: name of the linear from usual embeddings, and of the norm behind it.
        gate, back, post: names of a layer's two linears and of the norm behind them.
    """

    width: int
    table: str = "model.embed_tokens_per_layer"
    projection: tuple[str, str] = ("model.per_layer_model_projection", "model.per_layer_projection_norm")
    gate: str = "per_layer_input_gate"
    back: str = "per_layer_projection"
    post: str = "post_per_layer_input_norm"


@dataclass(frozen=True, slots=True)
class AltUpNames:
    """Alternating updates (AltUp): several streams of the residual, of which a layer computes one and corrects all.

    Beside attention runs a product of low rank (LAuReL).

    Args:
        streams: how many there are.
        active: the stream that layers compute.
        split: name of the linear from an embedding to stream {} + 1.
        merge: name of the linear from the last layer's stream {} + 1 to what is averaged.
        router: names of the norm and of the linear that give a row's routes.
        predict, correct: names of the linears from routes to the coefficients of streams.
        output_scale: name of the factors of the active stream that a layer's own embedding meets; None: 1.
        laurel: names of the linears to the low rank and back, and of the norm behind them.
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

    The layer reads the embedding of a token, and the row that the model had in front of its head one position before.
    It is of the kind of the model's last layer that attends, and shares the model's head.

    Args:
        layer: the beginning of the layer's names.
        input: name of the linear that makes the layer's input of both.
        norms: names of the norms of the embedding and of the row.
        final_norm: name of the norm in front of the head.
    """

    layer: str = "mtp.layers.0."
    input: str = "mtp.fc"
    norms: tuple[str, str] = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    final_norm: str = "mtp.norm"


def nextn(config: Any) -> MtpNames:
    """Return the names of an MTP layer that files number as the layer behind the last one (DeepSeek, GLM)."""
    start = f"model.layers.{config.num_hidden_layers}."
    return MtpNames(start, f"{start}eh_proj", (f"{start}enorm", f"{start}hnorm"), f"{start}shared_head.norm")


@dataclass(frozen=True, slots=True)
class AssistantNames:
    """Names and sizes of an assistant, which guesses tokens for another model.

    Its layers read the other model's keys and values, and have none of their own.

    Args:
        hidden_size: of the other model.
        clusters: how many clusters of tokens the head has; 0: each token gets a logit of its own.
        chosen: how many clusters a row chooses; only their tokens get logits.
        input: name of the linear that makes a row of a token's embedding and of the other model's row.
        output: name of the linear that turns the row in front of the head into the row for the next guess.
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
        name: the tensor's.
        parts: which of its rows, in this order; empty: all.
        factors: of each part's products and biases; empty: 1.
    """

    name: str
    parts: tuple[range, ...] = ()
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RecurrenceNames:
    """Recurrent layers in the place of some layers' attention, or beside it: gated delta nets, or Mamba 2.

    Each head keeps a matrix of keys by values, its state. A token decays the state, adds its key times something of its
    value, and multiplies the state by its query. Queries, keys and values come out of a short convolution and SiLU.
    Mamba 2 calls them C, B and x.

    Args:
        layers: the layers that have one.
        inputs: which linears give queries, keys, values, steps, strengths (if it corrects) and gates, in this order.
        channels: the convolution's channels in the order of queries, keys and values; empty: they are in it.
        heads: of values.
        key_heads: of queries and keys.
        key_dim, value_dim: elements of a head.
        kernel: taps of the convolution.
        norm_groups: groups of outputs that are normed by themselves.
        corrects: whether what is added is the value less what the state has for the key (the delta rule).
        gate_first: whether the gate multiplies before the norm.
        start: beginning of the other tensors' names.
        skip: name of the factors of values that go past the state; None: no value does.
        norm: name of the norm of outputs; None: they are not normed.
        gate_eps: of that norm; None: that of the others.
        strength: what the sigmoid of a strength is multiplied with.
        out: name of the last linear.
        input_factor: of the products of `inputs`.
        layer: the other tensors' names in such a layer, where they differ from those of the rest.
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
    """One model's architecture, every number resolved.

    Args:
        norm_eps: of every norm.
        score_scale: what queries are multiplied with.
        activation: a name of `ACTIVATIONS`.
        tensors: what the tensors are called.
        layer_norm: whether norms subtract the mean; else they are RMS norms.
        norm_offset: added to the weights of norms; 1 where a file holds what is beyond 1.
        qk_norm: NONE, SHARED, PER_HEAD or WHOLE.
        norms_rotated: whether norms of queries and keys come after the rotation.
        qkv_by_head: whether the one tensor of `qkv` holds, for one KV head after another, its queries, key and value.
        gated: whether the MLP multiplies its activations with ups.
        parallel: whether the MLP reads what attention reads.
        partial_rotary: whether the rotary embedding takes the configuration's share of a head.
        interleaved: whether it turns neighbours, and not the halves.
        no_rope: layers whose positions are not rotated.
        score_cap, logit_cap: x becomes cap * tanh(x / cap); 0: as it is.
        embedding_scale, residual_scale: of a token's embedding, of what is added to the residual.
        logit_divisor: of the logits.
        gate_slope, gate_limit: of "clamped_swiglu".
        experts: None where every layer has one MLP.
        convolution: None where no layer is a short convolution.
        recurrence: None where no layer keeps a state.
        latent: None where each head has keys and values of its own.
        gated_attention: whether each head's queries are followed by gates, whose sigmoid multiplies what it attends to.
        head_gated: whether the last linear of `qkv` gives each head one such gate.
        value_norm: whether the values of each head are normed, without weights.
        layer_embeddings: None where only the first layer reads an embedding.
        altup: None where the residual is one stream.
        sparse: by layer, the standard deviations beyond their mean from which gates count; other layers: all gates do.
        attending: the layers that attend; None: those that neither convolve nor recur.
        mlps: the layers that have an MLP or experts; None: all.
        factors: of a linear's products and bias, by the end of its name.
        input_factor: of the products of queries, keys and values.
        mtp: the names of the MTP layer, which a file may have; None where it is not computed.
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
        """Whether a layer attends."""
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
    """Whether a rotary embedding that calls itself dynamic has a fixed factor of its base (Hunyuan)."""
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
    """Let a configuration give the usual value of what differs among its layers; `shapes_of` gives each layer's."""
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "is_heterogeneous", False):
            part.allow_global_per_layer_attribute_access = True


def shapes_of(config: Any) -> list[tuple[int, int]]:
    """Return each layer's number of KV heads, and the elements of one."""
    heads, size = kv_heads_of(config), head_dim_of(config)
    shapes = [(heads, size)] * config.num_hidden_layers
    if getattr(config, "is_heterogeneous", False):
        for layer, own in config.to_dict()["per_layer_config"].items():
            shapes[int(layer)] = own.get("num_key_value_heads", heads), own.get("head_dim", size)
    return shapes


def layer_bases(config: Any) -> tuple[float, ...]:
    """Return the rotary bases that layers have of their own, each once; none where all layers have the usual one."""
    bases = sorted({base for base in getattr(config, "layer_rope_theta", None) or () if base})
    return tuple(bases) if bases and bases != [config.rope_parameters["rope_theta"]] else ()


def kv_sources(config: Any) -> dict[int, int]:
    """Return the earlier layer that wrote the keys and values which a layer reads, for layers that write none.

    The layers of an assistant have no earlier one: they read another model's.
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

    A layer without keys has queries alone: it reads what another layer wrote. Keys without values are values, too.
    """
    if len(names) == 1 or f"{names[1]}.weight" not in tensors:
        return names[:1]
    queries, keys, values, *gates = names
    return queries, keys, values if f"{values}.weight" in tensors else keys, *gates


def latent_rows(names: LatentNames) -> tuple[SomeRows, SomeRows]:
    """Rows that make queries (or the row that these are made of), then of a key what is rotated and the latent."""
    order = (range(names.rank, names.rank + names.rotated), range(names.rank))
    return SomeRows(names.query[0] if names.query_rank else names.queries), SomeRows(names.latent[0], order)


def gated_rows(names: Sequence[str], config: Any) -> tuple[SomeRows, ...]:
    """Rows of queries, keys, values and gates where each head's queries are followed by its gates."""
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
