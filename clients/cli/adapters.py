"""`genbatch adapters`: the LoRA adapters of a running service."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from genbatch.clients.cli.command import run_command, with_flag_groups
from genbatch.clients.cli.connection import AddressFlags, address_of, remote_client

adapters = typer.Typer(
    name="adapters", help="Load, list and unload the LoRA adapters of a running service.", no_args_is_help=True
)
_NAME = Annotated[str, typer.Argument(metavar="NAME", help="What requests name as their model.")]


@adapters.command()
@with_flag_groups
def load(
    name: _NAME,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="As PEFT writes it, on the service's machine.")],
    *,
    service: AddressFlags,
) -> None:
    """Have a service serve one more adapter.

    Example:

      genbatch adapters load sql ./sql-lora --connect ipc:///run/genbatch/zeromq.sock
    """
    run_command(partial(_load, name, directory.expanduser().absolute(), service))


@adapters.command()
@with_flag_groups
def unload(
    name: _NAME,
    *,
    timeout_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="Requests that are still open after so long are cancelled.")
    ] = 30.0,
    service: AddressFlags,
) -> None:
    """Have a service refuse new requests for an adapter, wait for those it has, and forget it."""
    run_command(partial(_unload, name, timeout_s, service))


@adapters.command("list")
@with_flag_groups
def list_adapters(*, service: AddressFlags) -> None:
    """Print the names of a service's adapters."""
    run_command(partial(_list, service))


async def _load(name: str, directory: Path, service: AddressFlags) -> None:
    async with remote_client(address_of(service), service) as client:
        await client.load_adapter(name, str(directory))
    typer.echo(f"{name} is served")


async def _unload(name: str, timeout_s: float, service: AddressFlags) -> None:
    async with remote_client(address_of(service), service) as client:
        ended = await client.unload_adapter(name, timeout_s)
    cancelled = f", {ended.num_cancelled} requests were cancelled" if ended.num_cancelled else ""
    typer.echo(f"{name} is served no longer{cancelled}")


async def _list(service: AddressFlags) -> None:
    async with remote_client(address_of(service), service) as client:
        for card in await client.models():
            if card.parent is not None:
                typer.echo(card.id)
