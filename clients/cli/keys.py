"""`genbatch keys`: keys and tokens for clients on other machines."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from genbatch.actors.security.key_files import KeyFileError
from genbatch.clients.cli.command import report
from genbatch.clients.cli.settings import config_folder

if TYPE_CHECKING:
    from genbatch.actors.security.curve_keys import KeyStore

keys = typer.Typer(
    name="keys",
    help="Make keys and tokens for clients on other machines.",
    no_args_is_help=True,
    add_completion=False,
)


def default_directory() -> Path:
    """Return the default folder of a user's keys.

    Raises:
        KeyFileError: this user has no home.
    """
    folder = config_folder()
    if folder is None:
        raise KeyFileError(Path("keys"), "this user has no home folder; name a folder (--dir)")
    return folder / "keys"


Directory = Annotated[
    Path | None,
    typer.Option("--dir", "-d", metavar="DIR", help="The folder of keys; the default is ~/.config/genbatch/keys."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the tenant.")]


def _reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyFileError as error:
            raise typer.Exit(report(error)) from None

    return run


@keys.command()
@_reports_errors
def new(
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="A new folder; the default is ~/.config/genbatch/keys.")
    ] = None,
) -> None:
    """Make a service's keys.

    Example:

      genbatch keys new

      genbatch keys client alice

      genbatch serve --bind tcp://0.0.0.0:5555 --keys ~/.config/genbatch/keys
    """
    store = _store(directory)
    typer.echo(f"server key: {store.new_server()}")
    typer.echo(f"serve with: --keys {store.directory}")
    where = "" if directory is None else f" --dir {directory}"
    typer.echo(f"let a client in: genbatch keys client NAME{where}")


@keys.command()
@_reports_errors
def client(name: Name, directory: Directory = None) -> None:
    """Make and authorise a client's keys. Give the printed file to the client over a channel that you trust."""
    path = _store(directory).new_client(name)
    typer.echo(f"client key: {path}")
    typer.echo(f"use it with: --connect tcp://HOST:PORT --client-key {path.name}")


@keys.command()
@_reports_errors
def authorise(
    name: Name,
    public_key: Annotated[str, typer.Argument(metavar="KEY", help="A public key of 40 characters, or its file.")],
    directory: Directory = None,
) -> None:
    """Authorise a client that made its own keys."""
    _store(directory).authorise(name, public_key)
    typer.echo(f"{name} may connect; it needs the server key, {_store(directory).server_key}")


@keys.command()
@_reports_errors
def token(name: Name, directory: Directory = None) -> None:
    """Make a token for msgpack-RPC and HTTP. It is printed once, and only its hash is kept."""
    store = _store(directory)
    typer.echo(store.new_token(name))
    typer.echo(f"serve with: --tokens {store.tokens}", err=True)


@keys.command()
@_reports_errors
def revoke(name: Name, directory: Directory = None) -> None:
    """Revoke a name's key and token. A running service refuses it at once."""
    _store(directory).revoke(name)
    typer.echo(f"{name} is revoked")


@keys.command(name="list")
@_reports_errors
def list_tenants(directory: Directory = None) -> None:
    """List the names with a key or a token."""
    table = Table(box=None, padding=(0, 2), show_edge=False)
    for heading in ("NAME", "KEY", "TOKEN"):
        table.add_column(heading, no_wrap=True)
    for tenant in _store(directory).tenants():
        # A key may have brackets, which are markup for rich.
        table.add_row(escape(tenant.name), escape(tenant.public_key or "-"), "yes" if tenant.has_token else "-")
    Console(soft_wrap=True).print(table)


def _store(directory: Path | None) -> "KeyStore":
    from genbatch.actors.security.curve_keys import KeyStore

    return KeyStore(directory or default_directory())
