"""The client that a command works with: of a service at an address, or of a private one in this process.

LoadingBars are what a person sees while a model is fetched, converted and loaded.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import trio
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from genbatch.clients.cli.command import UsageError
from genbatch.clients.cli.engine_flags import DEFAULT_MODEL, ModelFlags
from genbatch.clients.interface import Client

if TYPE_CHECKING:  # a command that only prints its help imports no sockets
    from genbatch.clients.remote import RemoteClient

_TITLES = {
    "start": "Starting PyTorch",
    "download": "Downloading the model",
    "convert": "Converting to safetensors",
    "load": "Loading the model",
}
_MEGABYTE = 1_000_000


class LoadingBars:
    """A context manager that is called as progress(stage, done, total), on any thread.

    Bars on a terminal, gone once the model is there; elsewhere one line as each stage begins.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._begin(stage)
        detail = f"{done / _MEGABYTE:.1f} / {total / _MEGABYTE:.1f} MB" if stage == "download" and total else ""
        self._bars.update(self._tasks[stage], completed=done, total=total or None, detail=detail)

    def _begin(self, stage: str) -> None:
        for earlier in self._tasks.values():
            self._bars.update(earlier, visible=False)
        title = _TITLES.get(stage, stage)
        self._tasks[stage] = self._bars.add_task(title, total=None, detail="")
        if not self._console.is_terminal:
            self._console.print(f"{title}...")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFlags:
    """Where the service is, or which model a private one loads."""

    connect: Annotated[
        str | None,
        typer.Option(
            "--connect",
            "-c",
            metavar="ADDRESS",
            help="A running service, ipc://, tcp://, unix:// or rpc://; if not given, a private one is started.",
        ),
    ] = None
    client_key: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="This client's keys, for a service that asks for them (`genbatch keys`)."),
    ] = None
    server_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The service's public key, or its file, if the client's file has it not."),
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            envvar="GENBATCH_TOKEN",
            help="For a service at unix:// or rpc:// that asks for one (`genbatch keys token`).",
        ),
    ] = None
    tls_ca: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="rpc:// is encrypted, and this is the certificate to trust."),
    ] = None
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="A name, a Hugging Face directory or id, or a .gguf file."),
    ] = DEFAULT_MODEL


@asynccontextmanager
async def open_client(connection: ConnectionFlags, engine: ModelFlags, *, n_parallel: int = 1) -> AsyncIterator[Client]:
    """A client for as long as the body runs; progress of a private service's start goes to standard error.

    Raises:
        UsageError: an address, and flags that only a private service reads.
        GenbatchError, ModelError, OptionError: as the client or the service raises.
    """
    async with AsyncExitStack() as stack:
        if connection.connect is not None:
            _refuse_flags_of_a_private_service(connection, engine)
            if connection.server_key is not None and connection.client_key is None:
                raise UsageError("server_key: a service that has keys asks for the client's too (--client-key FILE)")
            yield await stack.enter_async_context(_remote_client(connection.connect, connection))
            return
        if connection.tls_ca is not None:
            raise UsageError("tls_ca: a private service asks for none; say where the service is (--connect)")
        if connection.client_key is not None or connection.server_key is not None:
            raise UsageError("client_key: a private service asks for none; say where the service is (--connect)")
        with LoadingBars(Console(stderr=True)) as bars:
            await import_engine(bars)
            from genbatch.clients.in_process import open_batcher

            # All callers are ours: there is nobody to wait for.
            batcher = open_batcher(
                connection.model, **engine.by_name(), n_parallel=n_parallel, batch_timeout=0.0, progress=bars
            )
            client = await stack.enter_async_context(batcher)
        yield client


def _remote_client(address: str, connection: ConnectionFlags) -> "RemoteClient":
    """The client that speaks what the address says: ipc:// and tcp:// are ZeroMQ, unix:// and rpc:// msgpack-RPC."""
    if address.startswith(("unix://", "rpc://")):
        from genbatch.actors.security.key_files import client_context
        from genbatch.clients.remote import RPCClient

        if connection.client_key is not None:
            raise UsageError("client_key: keys are for ZeroMQ; a service at this address asks for a token (--token)")
        encrypts = connection.tls_ca is not None
        tls = client_context(Path(connection.tls_ca or "")) if encrypts else None
        return RPCClient(address, token=connection.token, tls=tls)
    from genbatch.clients.remote import ZeroMQClient

    if connection.tls_ca is not None:
        raise UsageError("tls_ca: TLS is for msgpack-RPC; a service at this address has keys (--client-key)")
    return ZeroMQClient(address, client_key=connection.client_key, server_key=connection.server_key)


async def import_engine(bars: LoadingBars) -> None:
    """Imports torch and transformers on a thread: seconds, in which the bars move and Ctrl-C is heard."""
    bars("start", 0, 0)
    await trio.to_thread.run_sync(import_module, "genbatch.actors.service.service", abandon_on_cancel=True)


def _refuse_flags_of_a_private_service(connection: ConnectionFlags, engine: ModelFlags) -> None:
    ours, default = engine.by_name(), ModelFlags().by_name()
    given = [name for name in ours if ours[name] != default[name]]
    if connection.model != DEFAULT_MODEL:
        given.insert(0, "model")
    if given:
        raise UsageError(f"{given[0]}: the service at {connection.connect} has its own; give it to `genbatch serve`")
