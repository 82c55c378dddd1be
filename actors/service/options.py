"""ServiceOptions: the addresses of a service and the options of its processes, with their defaults in one place."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from genbatch.actors.observing.observe import LogFormat, LogLevel
from genbatch.nif.errors import OptionError

EngineKind = Literal["process", "thread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The options of a service, besides EngineOptions and BatcherOptions.

    Args:
        bind: a ZeroMQ address to listen at, ipc://PATH or tcp://127.0.0.1:PORT. If not given, `genbatch serve` makes a
            socket in the user's runtime directory, and a program has no callers but its own.
        rpc_bind: an address for msgpack-RPC clients, unix://PATH or tcp://127.0.0.1:PORT.
        http: where OpenAI's API and a page to try it are served over HTTP, :PORT (of 127.0.0.1) or HOST:PORT.
        metrics: where /metrics and /health alone are served over HTTP, :PORT (of 127.0.0.1) or HOST:PORT, without TLS
            and without asking for a token. Whoever reaches it learns the tenants' names.
        keys: folder made by `genbatch keys new`: ZeroMQ clients need a key of its list, and all is encrypted.
        tokens: file made by `genbatch keys token`: msgpack-RPC and HTTP clients need a token of it.
        tls_cert: PEM file of the service's certificate: msgpack-RPC and HTTP over TCP are encrypted.
        tls_key: PEM file of its private key.
        http_insecure: whether `http` may be an address on a network without tokens and TLS: for a container, or behind
            a proxy, where something else keeps strangers out.
        http_strict: whether HTTP refuses a field that no API has published, so that a misspelt one is told. Otherwise
            the field is ignored, and the header x-ignored-fields of the response names it.
        allowed_hosts: names by which HTTP clients may call the service (their Host header), and then no others but
            localhost; () is every name, on a loopback address localhost alone.
        allowed_origins: origins whose web pages may use it over HTTP, such as https://chat.example.
        batch_dir: folder where files and batches of OpenAI's API are kept, so that batches survive a restart. If not
            given, /v1/files and /v1/batches are off.
        models: a directory of models, or a TOML file with a table of options for each model. Each is loaded by the
            first request that names it.
        keep_alive: seconds without requests after which such a model is unloaded; negative for never.
        model_memory: GiB that such models may take together. For another model to load, the least recently used ones
            are unloaded. 0: `max_memory_percent` of the memory that is free at the start.
        engine: "process" runs the Batcher in a process of its own, which is restarted when it dies; "thread" in this
            one, which ends with it.
        spare_engine: whether a process waits that has imported an engine's libraries, so that an engine which died is
            back some seconds sooner. It takes about 300 MB, once for all models.
        take_over: whether `genbatch serve` takes the place of a service that this user runs at one of these addresses.
            This service loads its model first. Then it gets the addresses, and the other one ends what is open, within
            its own `shutdown_timeout_s`. Without such a service it starts as usual.
        shutdown_timeout_s: seconds that accepted requests have to end in when the service is told to stop.
        max_restarts: engine processes that may die within `restart_window_s` seconds; with one more the service gives
            up.
        restart_window_s: seconds within which those deaths are counted.
        log_format: "text" for people or "json" for machines, a line an event on standard error.
        log_level: "debug" tells every step of a request's life, "info" its end, "warning" and "error" less.
        otel: a span of each request goes to where the standard OTEL_ variables say. Needs the extra `genbatch[otel]`.
    """

    bind: str | None = None
    rpc_bind: str | None = None
    http: str | None = None
    metrics: str | None = None
    keys: str | None = None
    tokens: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    http_insecure: bool = False
    http_strict: bool = False
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    batch_dir: str | None = None
    models: str | None = None
    keep_alive: float = 300.0
    model_memory: float = 0.0
    engine: EngineKind = "thread"
    spare_engine: bool = False
    take_over: bool = False
    shutdown_timeout_s: float = 30.0
    max_restarts: int = 5
    restart_window_s: float = 300.0
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    otel: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            OptionError: a value is out of range; the error names the option.
        """
        if self.engine not in get_args(EngineKind):
            raise OptionError("engine", f"{self.engine!r} is neither process nor thread")
        if self.spare_engine and self.engine != "process":
            raise OptionError("spare_engine", "goes with engine process: an engine in this one ends with it")
        for name, known in (("log_format", get_args(LogFormat)), ("log_level", get_args(LogLevel))):
            if getattr(self, name) not in known:
                raise OptionError(name, f"{getattr(self, name)!r} is none of {', '.join(known)}")
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_cert" if self.tls_cert is None else "tls_key"
            raise OptionError(missing, "a certificate and its private key go together")
        for name in ("allowed_hosts", "allowed_origins", "http_strict", "batch_dir"):
            if self.http is None and getattr(self, name):
                raise OptionError(name, "goes with http, which is not given")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"https?://[^/\s]+/?", origin):
                raise OptionError("allowed_origins", f"{origin!r} is no origin, which is SCHEME://HOST[:PORT]")
        for host in self.allowed_hosts:
            if not re.fullmatch(r"[^/:\s]+|\[[0-9a-fA-F:]+\]", host):
                raise OptionError("allowed_hosts", f"{host!r} is no host's name; it has no scheme and no port")
        if self.models is not None and self.engine != "process":
            raise OptionError("models", "goes with engine process: each model has a process of its own")
        if not math.isfinite(self.keep_alive):
            raise OptionError("keep_alive", f"must be a number of seconds, not {self.keep_alive}")
        for name in ("shutdown_timeout_s", "max_restarts", "restart_window_s", "model_memory"):
            if not getattr(self, name) >= 0:  # also refuses NaN
                raise OptionError(name, f"{getattr(self, name)} is less than 0")
