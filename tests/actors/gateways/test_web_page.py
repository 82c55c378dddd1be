"""A page in a real browser posts to every door of a service of its reader's: nothing is done, nobody is disturbed."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio

from genbatch import RPCClient, ZeroMQClient
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.supervisor import Supervisor
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.service.gateway_process import Listeners
from genbatch.actors.service.options import ServiceOptions
from genbatch.proto.messages import Result
from tests.actors.gateways.http.chromium import find_chromium, open_page
from tests.actors.gateways.scripted_batcher import PATIENCE_S, ScriptedBatcher

pytestmark = [
    pytest.mark.trio,
    pytest.mark.skipif(find_chromium() is None, reason="needs Chromium or Chrome on the PATH"),
]

# What a page can do without asking anybody: any bytes as text/plain, a form, a socket, an image, and TLS.
HARM = """
(async () => {
  const [port, hex] = %s;
  const bytes = new Uint8Array(hex.match(/../g).map(byte => parseInt(byte, 16)));
  const options = {method: "POST", mode: "no-cors", headers: {"Content-Type": "text/plain"}};
  const at = (scheme) => `${scheme}://127.0.0.1:${port}`;
  const tries = [];
  for (let i = 0; i < 10; i++) {
    tries.push(fetch(at("http") + "/v1/load_lora_adapter", {...options, body: bytes}));
    tries.push(fetch(at("http") + "/", {...options, body: new Blob([new Uint8Array(4096), bytes])}));
    tries.push(fetch(at("https") + "/", {...options, body: bytes}));
    tries.push(fetch(at("http") + "/v1/completions", {...options, body: JSON.stringify({prompt: "by a page"})}));
    navigator.sendBeacon(at("http") + "/", bytes);
    tries.push(new Promise(done => {
      const socket = new WebSocket(at("ws"));
      socket.onopen = () => { socket.send(bytes); done("opened"); };
      socket.onerror = () => done("refused");
    }));
  }
  const ends = await Promise.allSettled(tries);
  return ends.filter(end => end.value === "opened").length;
})()
"""


@asynccontextmanager
async def page_of_a_stranger(directory: Path) -> AsyncIterator[str]:
    """The url of an empty page of another origin."""

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(4096)
            await stream.send_all(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<title>x</title>"
            )

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer, [listener])
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}/"
        nursery.cancel_scope.cancel()


@pytest.mark.long
async def test_what_a_web_page_posts_to_any_port_of_the_service_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []
    call = Dispatcher.call

    async def remember(dispatcher: Dispatcher, method: str, *args: Any, **named: Any) -> object:
        called.append(method)
        return await call(dispatcher, method, *args, **named)

    monkeypatch.setattr(Dispatcher, "call", remember)
    caplog.set_level(logging.INFO)
    options = ServiceOptions(bind="tcp://127.0.0.1:*", rpc_bind="tcp://127.0.0.1:0", http="127.0.0.1:0")
    batcher, telemetry, ends = ScriptedBatcher(), Telemetry(), []
    telemetry.attach(lambda event, _, of: ends.append(of) if event == "supervisor.child_exit" else None)
    results: list[Result] = []
    drains = [[0, n, method, [{"timeout_s": 0.0}]] for n, method in enumerate(("drain", "load_adapter", "generate"))]
    body = b"".join(map(msgpack.packb, drains))
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            listeners = Listeners(await start(nursery, batcher), options, telemetry)
            await nursery.start(Supervisor([listeners.child()]).run)
            zeromq, rpc, http = listeners.addresses
            async with (
                ZeroMQClient(zeromq) as first,
                RPCClient(rpc) as second,
                page_of_a_stranger(tmp_path) as url,
                open_page(url, tmp_path) as page,
                trio.open_nursery() as calls,
            ):

                async def ask(client: ZeroMQClient | RPCClient, prompt: str) -> None:
                    results.append(await client.generate(prompt))

                # Other browsers' heads are shorter: what is behind the head must not be saved by the head's length.
                await page.send("Network.setUserAgentOverride", userAgent="x")
                for client, prompt in ((first, "hold one"), (second, "hold two")):
                    calls.start_soon(ask, client, prompt)
                    await batcher.arrival(prompt)
                for address in (zeromq, rpc, http):
                    # What a door speaks, as far as a page knows it: also frames of ZeroMQ behind its POST.
                    where = json.dumps([address.rpartition(":")[2], (body + bytes(2) + body).hex()])
                    assert await page.evaluate(HARM % where) == 0
                for prompt in ("hold one", "hold two"):
                    batcher.held[prompt].finish()
            assert len(results) == 2
            nursery.cancel_scope.cancel()
    assert sorted(called) == ["generate", "generate", "hello"]
    assert [one.request.prompt for one in batcher.requests] == ["hold one", "hold two"]
    assert not ends and not [record for record in caplog.records if record.levelno >= logging.ERROR]
