"""The messages about the service itself: its introduction, models, health, counters, adapters and drain."""

from typing import Literal

import msgspec

HealthStatus = Literal["ready", "draining", "stuck", "down"]


class HelloRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Introduce a client; the first message on a connection to a service that requires a token.

    Args:
        token: the client's token; None where none is required.
    """

    token: str | None = None


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A service's introduction.

    Args:
        methods: the names of its methods.
        tenant: the tenant of the caller's requests; None where no token or key is required.
        version: the version of the wire; it grows when older clients cannot continue. Release 0.1.0 omits it: 1.
        stream_options: the names of a stream's options. Release 0.1.0 omits them: two.
    """

    methods: tuple[str, ...]
    tenant: str | None = None
    version: int = 1
    stream_options: tuple[str, ...] = ("credit", "coalesce")


class ModelsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List the models that are served; answered with Models."""


class HealthRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Report the health of the service; answered with Health."""


class StatsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Report the counters; answered with a dict."""


ModelState = Literal["loaded", "loading", "unloaded", "failed"]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served.

    Args:
        id: its name.
        n_ctx: most positions, prompt and output together, of one request.
        n_parallel: sequences generated at once.
        vocab_size: width of the logits; token ids are below it.
        dtype: the type of the weights before quantising, such as "float32".
        quantize: "none", or the format of the quantised weights.
        runner: the name of the runner that evaluates the model.
        device: "cpu", or a GPU such as "cuda:0".
        embedding_size: elements of its embeddings; None for a model without embeddings.
        generates: whether the model continues text.
        labels: the names of its scores; empty for a model without scores.
        sampling: the sampling parameters in the model's files, for requests that do not set them.
        parent: the model that an adapter adapts; None for a model.
        thinks: whether `reasoning_effort` and `max_thinking_tokens` have an effect.
        state: "loaded"; for models on demand also "unloaded", "loading" or "failed". Before its first load a model's
            numbers are 0 and its texts empty.
    """

    id: str
    n_ctx: int
    n_parallel: int
    vocab_size: int
    dtype: str
    quantize: str
    runner: str
    device: str
    embedding_size: int | None = None
    generates: bool = True
    labels: tuple[str, ...] = ()
    sampling: dict[str, float] = {}
    parent: str | None = None
    thinks: bool = False
    state: ModelState = "loaded"


class Models(msgspec.Struct, frozen=True, kw_only=True):
    """The served models."""

    models: tuple[ModelCard, ...]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The health of the service.

    Args:
        status: "ready"; "draining": new requests are refused; "stuck": work is pending and no step has ended for too
            long; "down": the engine does not answer, and the counts are unknown.
        steps: steps since the start.
        requests_running: sequences that have a slot.
        requests_waiting: sequences that wait for a slot.
        stalled_s: seconds since the last progress, while work is pending.
    """

    status: HealthStatus
    steps: int
    requests_running: int
    requests_waiting: int
    stalled_s: float


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load a LoRA adapter.

    Args:
        name: the name that requests set as their model.
        path: the absolute path of its directory on the service's machine.
    """

    name: str
    path: str


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unload a LoRA adapter: new requests are refused, accepted requests end.

    Args:
        name: its name.
        timeout_s: seconds after which open requests are cancelled; >= 0.
    """

    name: str
    timeout_s: float = 30.0


class LoadModelRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Load a model that is loaded on demand, and set how long it stays loaded without requests.

    Args:
        model: as `generate` takes it.
        keep_alive: seconds without requests after which the model is unloaded. A negative number keeps it. 0 unloads it
            once it has no open request. None leaves the time as it is.
    """

    model: str | None = None
    keep_alive: float | None = None


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drain the service: refuse new requests, and let accepted requests end.

    Args:
        timeout_s: seconds after which open requests are cancelled; >= 0.
    """

    timeout_s: float = 30.0


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """Every accepted request, or every request with the unloaded adapter, has ended.

    Args:
        num_cancelled: the requests that were cancelled at the timeout.
    """

    num_cancelled: int
