"""Chromium: a headless browser for tests, spoken to over its own debugging protocol."""

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from trio_websocket import WebSocketConnection, open_websocket_url

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Nothing is asked of any other host, and no rights are needed beyond those of a test.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--force-device-scale-factor=1"),
)


def find_chromium() -> str | None:
    """The browser's path, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab."""

    def __init__(self, connection: WebSocketConnection) -> None:
        self._connection = connection
        self._next_id = 0
        self.problems: list[str] = []  # errors in the console, exceptions in scripts

    async def send(self, method: str, **params: object) -> dict[str, Any]:
        """What the browser answers to a command."""
        self._next_id += 1
        await self._connection.send_message(json.dumps({"id": self._next_id, "method": method, "params": params}))
        while True:
            message = json.loads(await self._connection.get_message())
            if message.get("id") == self._next_id:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, a promise's once it has one."""
        answer = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Waits, frame by frame, for an expression to be true."""
        wait = f"new Promise(done => {{ const look = () => ({expression}) ? done() : setTimeout(look, 20); look(); }})"
        await self.evaluate(wait)

    async def screenshot(self) -> bytes:
        """The visible part, as PNG."""
        answer = await self.send("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])


@asynccontextmanager
async def open_page(url: str, directory: Path, *, size: str = "1440,900", dark: bool = False) -> AsyncIterator[Page]:
    """A new browser with one tab, which has loaded `url`.

    Args:
        directory: for the browser's files.
        size: of the window, width and height.
        dark: whether the reader's system is.
    """
    browser = find_chromium()
    assert browser is not None
    command = [browser, *FLAGS, f"--user-data-dir={directory}", f"--window-size={size}", "about:blank"]
    async with trio.open_nursery() as nursery:
        process, port = await nursery.start(_run, command)
        try:
            targets = await trio.to_thread.run_sync(_targets, port)
            tab = next(target for target in targets if target["type"] == "page")
            async with open_websocket_url(tab["webSocketDebuggerUrl"], max_message_size=2**26) as connection:
                page = Page(connection)
                for domain in ("Runtime", "Log", "Page"):
                    await page.send(f"{domain}.enable")
                scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
                await page.send("Emulation.setEmulatedMedia", features=[scheme])
                await page.send("Page.navigate", url=url)
                await page.until("document.readyState === 'complete' && location.href !== 'about:blank'")
                yield page
        finally:
            process.kill()
            nursery.cancel_scope.cancel()


async def _run(
    command: list[str], task_status: "trio.TaskStatus[tuple[trio.Process, int]]" = trio.TASK_STATUS_IGNORED
) -> None:
    """The browser's life; started with its port once it listens, which it says on its standard error."""
    async with trio.open_nursery() as nursery:
        run = await trio.lowlevel.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            said = b""
            assert run.stderr is not None
            while not (listening := re.search(rb"listening on ws://[^/]*:(\d+)/", said)):
                part = await run.stderr.receive_some()
                assert part, said
                said += part
            task_status.started((run, int(listening[1])))
            nursery.start_soon(_drain, run.stderr)
            await run.wait()
        finally:
            nursery.cancel_scope.cancel()
            run.kill()
            with trio.CancelScope(shield=True):
                await run.wait()
                await run.stderr.aclose()


async def _drain(stream: trio.abc.ReceiveStream) -> None:
    async for _ in stream:
        pass


def _targets(port: int) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        targets: list[dict[str, Any]] = json.load(answer)
    return targets
