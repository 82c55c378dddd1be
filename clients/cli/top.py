"""`genbatch top`: what a service is doing, live."""

import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated

import trio
import typer
from rich.console import Console
from rich.live import Live

from genbatch.actors.gateways.addresses import default_address
from genbatch.clients.cli.command import UsageError, run_command
from genbatch.clients.cli.top_history import TopHistory
from genbatch.clients.cli.top_screen import top_screen
from genbatch.clients.interface import Client
from genbatch.proto.errors import GenbatchError

# Seconds that a service may take to answer before the screen says so.
ANSWER_S = 5.0


def top(
    *,
    connect: Annotated[
        str | None,
        typer.Option("--connect", "-c", metavar="ADDRESS", help="The service; if not given, this user's default one."),
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.1, metavar="SECONDS", help="How often to look.")
    ] = 1.0,
    client_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="This client's key, of `genbatch keys client`.")
    ] = None,
    server_key: Annotated[str | None, typer.Option(metavar="KEY", help="The service's public key.")] = None,
) -> None:
    """Watch a service: slots, queue, KV memory, pace and tenants. q or Ctrl-C leaves.

    Example:

      genbatch top --connect tcp://127.0.0.1:5555 --interval 0.5
    """
    run_command(partial(_top, connect or default_address(), interval, client_key, server_key))


async def _top(address: str, interval: float, client_key: str | None, server_key: str | None) -> None:
    from genbatch.clients.zeromq import ZeroMQClient

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("genbatch top needs a terminal; `genbatch stats --json` is for programs")
    console, history = Console(), TopHistory()
    async with ZeroMQClient(address, client_key=client_key, server_key=server_key) as client:
        with _keys_at_once(), Live(console=console, screen=True, auto_refresh=False) as live:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_quit_on_q, nursery.cancel_scope)
                while True:
                    error = await _look(client, history)
                    width, height = console.size
                    live.update(top_screen(history, address, width, height, error=error), refresh=True)
                    await trio.sleep(interval)


async def _look(client: Client, history: TopHistory) -> str:
    """Takes the stats; returns what went wrong instead, or nothing."""
    try:
        with trio.fail_after(ANSWER_S):
            stats = await client.stats()
            if stats.get("engine") == "down":
                return "the engine is down"
            history.add(stats, trio.current_time())
    except GenbatchError as error:
        return str(error)
    except trio.TooSlowError:
        return "the service does not answer"
    return ""


async def _quit_on_q(scope: trio.CancelScope) -> None:
    while True:
        await trio.lowlevel.wait_readable(sys.stdin.fileno())
        pressed = os.read(sys.stdin.fileno(), 64)
        if not pressed or pressed[:1] in b"qQ":
            scope.cancel()
            return


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """The terminal hands over each key as it is pressed and shows none."""
    settings = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)
