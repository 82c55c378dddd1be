"""The flags that say where a service listens and how its processes live."""

from dataclasses import dataclass
from typing import Annotated

import typer

from genbatch.actors.observing.observe import LogFormat, LogLevel
from genbatch.actors.service.options import EngineKind

_LISTENING = "Listening"
_SECURITY = "Security"
_PROCESSES = "Processes"
_LOG = "Log"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFlags:
    """The fields of ServiceOptions, read by `settings_of`."""

    bind: Annotated[
        str | None,
        typer.Option(
            "--bind",
            "-b",
            metavar="ADDRESS",
            help="Where to listen: ipc://PATH or tcp://127.0.0.1:PORT; "
            "if not given, a socket in the user's runtime directory.",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    http: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST]:PORT",
            help="Serve OpenAI's API over HTTP too, and a page to try it; :8000 is on 127.0.0.1.",
            rich_help_panel=_LISTENING,
        ),
    ] = None

    keys: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A folder of `genbatch keys new`: ZeroMQ clients need a key on its list; any address may be bound.",
            rich_help_panel=_SECURITY,
        ),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A file of `genbatch keys token`: msgpack-RPC and HTTP clients need a token.",
            rich_help_panel=_SECURITY,
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="PEM certificate for msgpack-RPC and HTTP; with --tokens any address may be bound.",
            rich_help_panel=_SECURITY,
        ),
    ] = None
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key.", rich_help_panel=_SECURITY)] = (
        None
    )

    rpc_bind: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Where to listen for msgpack-RPC clients as well: unix://PATH or tcp://127.0.0.1:PORT.",
            rich_help_panel=_LISTENING,
        ),
    ] = None
    engine: Annotated[
        EngineKind,
        typer.Option(
            metavar="KIND",
            help="process: the model runs in a process of its own, which is restarted if it dies; thread: in this one.",
            rich_help_panel=_PROCESSES,
        ),
    ] = "process"
    shutdown_timeout_s: Annotated[
        float,
        typer.Option(help="Seconds that accepted requests have to end in after a signal.", rich_help_panel=_PROCESSES),
    ] = 30.0
    max_restarts: Annotated[
        int,
        typer.Option(
            help="Engine processes that may die within --restart-window-s before the service gives up.",
            rich_help_panel=_PROCESSES,
        ),
    ] = 5
    restart_window_s: Annotated[float, typer.Option(help="See --max-restarts.", rich_help_panel=_PROCESSES)] = 300.0

    log_format: Annotated[
        LogFormat, typer.Option(metavar="FORMAT", help="text for people, json for machines.", rich_help_panel=_LOG)
    ] = "text"
    log_level: Annotated[
        LogLevel,
        typer.Option(metavar="LEVEL", help="What to tell: debug, info, warning or error.", rich_help_panel=_LOG),
    ] = "info"
    otel: Annotated[
        bool,
        typer.Option(
            "--otel",
            help="Send a span of each request to where the OTEL_EXPORTER_OTLP_ variables say.",
            rich_help_panel=_LOG,
        ),
    ] = False
