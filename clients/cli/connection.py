"""The client of a command: for a service at an address, or for a private service in this process.

LoadingBars show the progress of downloading, converting and loading a model.

A PickedModel is a client with a default model, for a service of several models.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, cast

import msgspec
import trio
import typer

from genbatch.actors.gateways.addresses import default_address, is_listening
from genbatch.clients.cli.command import UsageError, lossy
from genbatch.clients.cli.option_flags import DEFAULT_MODEL, ModelFlags
from genbatch.clients.interface import Client, Stream
from genbatch.nif.models.model_names import check_sources
from genbatch.proto.messages import GenerateRequest

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from genbatch.clients.remote import RemoteClient


AnyRequest = TypeVar("AnyRequest", bound=msgspec.Struct)


class PickedModel(Client):
    """A `Client` that sets its model in requests without one.

    Args:
        client: sends the requests.
        model: the name of a model of the service.
    """

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model

    async def ask(self, request: msgspec.Struct) -> Any:
        """See `Client.ask`."""
        return await self._client.ask(self._picked(request))

    def open_stream(self, request: GenerateRequest) -> AbstractAsyncContextManager[Stream]:
        """See `Client.open_stream`."""
        return self._client.open_stream(self._picked(request))

    def _picked(self, request: AnyRequest) -> AnyRequest:
        if getattr(request, "model", self._model) is None:
            request = msgspec.structs.replace(request, model=self._model)
        return request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


_TITLES = {
    "start": "Starting",
    "download": "Downloading the model",
    "convert": "Converting to safetensors",
    "load": "Loading the model",
    "compile": "Compiling the kernels for this machine (once)",
    "pack": "Packing the weights",
}
_MEGABYTE = 1_000_000


class LoadingBars:
    """A context manager that is called as progress(stage, done, total), on any thread.

    On a terminal it shows bars until the model is loaded. Otherwise it prints a line at the beginning of each stage.
    """

    def __init__(self) -> None:
        from rich.console import Console  # imported late, since most commands show no bars
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(file=lossy(sys.stderr))
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
class AddressFlags:
    """The address of a service, and the keys or the token for it."""

    connect: Annotated[
        str | None,
        typer.Option(
            "--connect",
            "-c",
            metavar="ADDRESS",
            help="The service: ipc://, tcp://, unix:// or rpc://. The default is this machine's `genbatch serve`.",
        ),
    ] = None
    client_key: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="This client's keys, for a service that requires them (`genbatch keys`)."),
    ] = None
    server_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The service's public key or its file, if the client's file lacks it."),
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            envvar="GENBATCH_TOKEN",
            help="The token for a service at unix:// or rpc:// that requires one (`genbatch keys token`).",
        ),
    ] = None
    tls_ca: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Use TLS at rpc://, and trust this certificate."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFlags(AddressFlags):
    """The address of a service, or the model of a private service."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Start a private service of this model: a name, a Hugging Face directory or id, or a .gguf file. "
            f"The default without a running service is {DEFAULT_MODEL}. With --connect, a model of that service.",
        ),
    ] = None

    @property
    def private_model(self) -> str:
        """The model of a service that is started for this command."""
        return self.model or DEFAULT_MODEL


@asynccontextmanager
async def open_client(
    connection: ConnectionFlags, engine: ModelFlags, *, n_parallel: int = 1, finds_running: bool = False
) -> AsyncIterator[Client]:
    """Open a client; the progress of a private service's start goes to standard error.

    Args:
        n_parallel: the option of a private service.
        finds_running: whether to use the service at the default address, if there is one and no flag excludes it.

    Raises:
        UsageError: the flags have an address, and options of a private service.
        GenbatchError, ModelError, OptionError: the client or the service fails.
    """
    async with AsyncExitStack() as stack:
        if connection.connect is not None:
            _refuse_flags_of_a_private_service(connection, engine)
            client: Client = await stack.enter_async_context(remote_client(address_of(connection), connection))
            yield client if connection.model is None else cast(Client, PickedModel(client, connection.model))
            return
        if connection.tls_ca is not None:
            raise UsageError("tls_ca: a private service uses none; name the service with --connect")
        wants_private = bool(_flags_of_a_private_service(connection, engine))
        if finds_running and not wants_private and (address := running_service()) is not None:
            _console().print(f"using the service at {address} (--model MODEL starts a private one)", style="dim")
            yield await stack.enter_async_context(remote_client(address, connection))
            return
        if connection.client_key is not None or connection.server_key is not None:
            raise UsageError("client_key: a private service uses none; name the service with --connect")
        check_sources(engine.options(connection.private_model))
        with LoadingBars() as bars:
            await import_engine(bars)
            from genbatch.clients.in_process import open_batcher

            # Only this command sends requests, so a step need not wait for others.
            batcher = open_batcher(
                connection.private_model, **engine.values, n_parallel=n_parallel, batch_timeout=0.0, progress=bars
            )
            client = await stack.enter_async_context(batcher)
        yield client


def default_service() -> str:
    """Return the address of `genbatch serve` without --bind: a variable's, the file's, or the user's own socket.

    Raises:
        OptionError: a variable or the file has a fault.
    """
    from genbatch.clients.cli.settings import read_settings

    bind: str = read_settings({}).value("bind") or default_address()
    return bind.replace("://*:", "://127.0.0.1:").replace("://0.0.0.0:", "://127.0.0.1:")


def running_service() -> str | None:
    """Return the default address if a service listens there."""
    address = default_service()
    return address if _is_there(address) else None


def address_of(flags: AddressFlags) -> str:
    """Return the address of the service for a command that needs a running service.

    Raises:
        UsageError: no service listens there.
    """
    address = flags.connect or default_service()
    if not _is_there(address):
        where = "" if flags.connect else "; start it with `genbatch serve`, or name its address with --connect ADDRESS"
        raise UsageError(f"no service is running at {address}{where}")
    return address


def _is_there(address: str) -> bool:
    """Return whether a service listens at the file of an address; assume so for other addresses."""
    transport, _, rest = address.partition("://")
    if transport not in ("ipc", "unix"):
        return True
    return bool(rest) and is_listening(Path(rest))


def remote_client(address: str, flags: AddressFlags) -> "RemoteClient":
    """Return a client for the address: ZeroMQ for ipc:// and tcp://, msgpack-RPC for unix:// and rpc://.

    Raises:
        UsageError: a flag does not apply to such an address.
    """
    if address.startswith(("unix://", "rpc://")):
        from genbatch.actors.security.key_files import client_context
        from genbatch.clients.remote import RPCClient

        if flags.client_key is not None:
            raise UsageError("client_key: keys are for ZeroMQ; a service at this address uses tokens (--token)")
        encrypts = flags.tls_ca is not None
        tls = client_context(Path(flags.tls_ca or "")) if encrypts else None
        return RPCClient(address, token=flags.token, tls=tls)
    from genbatch.clients.remote import ZeroMQClient

    if flags.tls_ca is not None:
        raise UsageError("tls_ca: TLS is for msgpack-RPC; a service at this address uses keys (--client-key)")
    if flags.server_key is not None and flags.client_key is None:
        raise UsageError("server_key: a service with keys requires the client's keys, too (--client-key FILE)")
    return ZeroMQClient(address, client_key=flags.client_key, server_key=flags.server_key)


async def import_engine(bars: LoadingBars) -> None:
    """Import the engine on a thread, so that bars move and Ctrl-C works meanwhile."""
    bars("start", 0, 0)
    await trio.to_thread.run_sync(import_module, "genbatch.actors.service.service", abandon_on_cancel=True)


def _flags_of_a_private_service(connection: ConnectionFlags, engine: ModelFlags) -> list[str]:
    """Return the flags of a private service that are set."""
    flags = engine.changed()
    return flags if connection.model is None else ["model", *flags]


def _refuse_flags_of_a_private_service(connection: ConnectionFlags, engine: ModelFlags) -> None:
    if flags := engine.changed():
        raise UsageError(f"{flags[0]}: the service at {connection.connect} has its own; set it at `genbatch serve`")


def _console() -> "Console":
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)
