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
        bind: a ZeroMQ address to listen at, ipc://PATH or tcp://127.0.0.1:PORT. By default `genbatch serve` makes a
            socket in the user's runtime directory, and a service in a program does not listen.
        rpc_bind: an address for msgpack-RPC clients, unix://PATH or tcp://127.0.0.1:PORT.
        http: an address for HTTP, :PORT (of 127.0.0.1) or HOST:PORT: OpenAI's API, and a page to try it.
        metrics: an address for /metrics and /health alone, :PORT (of 127.0.0.1) or HOST:PORT, without TLS and tokens.
            Every client that reaches it can read the tenants' names.
        keys: a folder from `genbatch keys new`. ZeroMQ clients then need a key, and connections are encrypted.
        tokens: a file from `genbatch keys token`. msgpack-RPC and HTTP clients then need a token.
        tls_cert: the PEM file of the service's certificate. msgpack-RPC and HTTP over TCP are then encrypted.
        tls_key: the PEM file of the certificate's private key.
        http_insecure: allow an address on a network for `http` without tokens and TLS, for a container or behind a
            proxy that keeps strangers out.
        http_strict: refuse HTTP requests with a field that no API has published, such as a misspelt one. Otherwise the
            field is ignored, and the header x-ignored-fields of the response names it.
        allowed_hosts: the only host names, besides localhost, that HTTP clients may use in their Host header. By
            default every name is allowed, but only localhost at a loopback address.
        allowed_origins: origins of web pages that may use the service over HTTP, such as https://chat.example.
        batch_dir: a folder for the files and batches of OpenAI's API, which then survive a restart. Without it
            /v1/files and /v1/batches are off.
        models: a directory of models, or a TOML file with a table of options for each model. The first request that
            names a model loads it.
        keep_alive: seconds without requests after which a model on demand is unloaded; a negative number keeps it.
        model_memory: most GiB of all models on demand together. The least recently used models are unloaded for another
            model. 0 takes `max_memory_percent` of the free memory at the start.
        engine: "process" runs the Batcher in another process, which is restarted if it dies; "thread" runs it in this
            process, which ends with it.
        spare_engine: keep a process with an engine's libraries imported, so that a dead engine is replaced some seconds
            sooner. It takes 60 MB, or 400 MB if a model runs in torch, once for all models.
        take_over: replace a service that this user runs at one of these addresses. The new service loads its model
            first. Then it gets the addresses, and the old service ends its open requests within its own
            `shutdown_timeout_s`. Without such a service it starts as usual.
        shutdown_timeout_s: seconds in which accepted requests may end after the service was told to stop.
        max_restarts: most deaths of engine processes within `restart_window_s` seconds; with one more the service ends.
        restart_window_s: seconds in which deaths of engine processes are counted.
        log_format: "text" for people or "json" for machines; the log is on standard error, one line for each event.
        log_level: "debug" logs every stage of a request, "info" its end, "warning" and "error" less.
        otel: send a span of each request to the address in the standard OTEL_ variables; needs `genbatch[otel]`.
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
            raise OptionError("spare_engine", "needs engine = process: an engine in this process ends with it")
        for name, known in (("log_format", get_args(LogFormat)), ("log_level", get_args(LogLevel))):
            if getattr(self, name) not in known:
                raise OptionError(name, f"must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_cert" if self.tls_cert is None else "tls_key"
            raise OptionError(missing, "a certificate needs its private key, and a key its certificate")
        for name in ("allowed_hosts", "allowed_origins", "http_strict", "batch_dir"):
            if self.http is None and getattr(self, name):
                raise OptionError(name, "needs http, which is not set")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"https?://[^/\s]+/?", origin):
                raise OptionError("allowed_origins", f"{origin!r} is not an origin (SCHEME://HOST[:PORT])")
        for host in self.allowed_hosts:
            if not re.fullmatch(r"[^/:\s]+|\[[0-9a-fA-F:]+\]", host):
                raise OptionError("allowed_hosts", f"{host!r} is not a host name; give it without a scheme and a port")
        if self.models is not None and self.engine != "process":
            raise OptionError("models", "needs engine = process: each model has its own process")
        if not math.isfinite(self.keep_alive):
            raise OptionError("keep_alive", f"must be a number of seconds, not {self.keep_alive}")
        for name in ("shutdown_timeout_s", "max_restarts", "restart_window_s", "model_memory"):
            if not getattr(self, name) >= 0:  # also refuses NaN
                raise OptionError(name, f"{getattr(self, name)} is less than 0")
