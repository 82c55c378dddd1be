"""The page in a real browser, over the whole tree with a tiny model."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.gateways.http.app import FILES
from genbatch.actors.gateways.http.service_calls import OPEN_PATHS
from genbatch.actors.runtime.actor import From
from genbatch.actors.security.curve_keys import KeyStore
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.service import open_service
from genbatch.nif.context.engine import EngineOptions
from genbatch.proto.messages import Token, ToolCall, ToolCallDelta
from genbatch.proto.service_messages import Models, ModelsRequest, StatsRequest
from tests.actors.gateways.http.chromium import find_chromium, open_page
from tests.actors.gateways.http.serving import served_http
from tests.actors.gateways.scripted_batcher import CARD, Held, ScriptedBatcher
from tests.waiting import ENGINE_PATIENCE_S, until_idle

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="needs Chromium or Chrome on the PATH")


@pytest.mark.trio
async def test_the_pages_files_come_with_a_policy_that_lets_nothing_else_run() -> None:
    async with served_http() as served:
        for path in FILES:
            response = await served.client.get(path)
            assert response.status_code == 200
            assert "default-src 'none'" in response.headers["content-security-policy"]
            for elsewhere in ("https://", "http://"):
                text = response.text.replace("http://www.w3.org/2000/svg", "")
                assert elsewhere not in text, path
    assert FILES.keys() <= OPEN_PATHS


@needs_chromium
@pytest.mark.trio
async def test_the_page_streams_prompts_side_by_side_and_stops_them(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    store = KeyStore(tmp_path / "keys")
    token = store.new_token("alice")
    engine = EngineOptions(model_path=str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, n_ctx=1024)
    options = ServiceOptions(http=":0", tokens=str(store.tokens))
    batcher = BatcherOptions(batch_timeout=1.0, n_parallel=4)
    with trio.fail_after(ENGINE_PATIENCE_S):
        async with (
            open_service(engine, batcher, options) as service,
            open_page(service.addresses[0] + "/compare", tmp_path) as page,
        ):
            await page.until("document.getElementById('health').textContent === 'ready'")
            await page.until("!document.getElementById('token-field').hidden")
            await page.evaluate(f"document.getElementById('token').value = {token!r}")
            await page.until("document.getElementById('slots').textContent === '4'")
            await page.evaluate("document.getElementById('max-tokens').value = 8")
            await page.evaluate("document.querySelector('.remove').click()")
            await page.evaluate("document.getElementById('run-all').click()")
            counts = "[...document.querySelectorAll('.count')].map(each => each.textContent)"
            await page.until(f"{counts}.every(count => Number(count) > 0)")
            await page.until("!document.querySelector('[aria-busy=true]')")
            assert len(await page.evaluate(counts)) == 3
            times = "[...document.querySelectorAll('.ttft')].map(each => each.textContent)"
            assert all(time.endswith("s") for time in await page.evaluate(times))
            await page.until("Number(document.getElementById('tokens').textContent) > 0")
            # An answer that goes on until it is stopped.
            await page.evaluate("document.getElementById('max-tokens').value = 150")
            await page.evaluate("document.querySelector('.run').click()")
            await page.until("document.querySelector('.count').textContent > 0")
            await page.evaluate("document.getElementById('stop-all').click()")
            await page.until("!document.querySelector('[aria-busy=true]')")
            await until_idle(lambda: service.batcher.call(StatsRequest()))
            # But for the refusals that made the field for the token appear.
            assert [problem for problem in page.problems if "status of 401" not in problem] == []


class Hostile(ScriptedBatcher):
    """Says what would run if it were markup."""

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        if not isinstance(request, Generate):
            return await super().handle_call(request, from_)
        held = Held(request, from_)
        held.emit(HOSTILE)
        return held.result()


HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@needs_chromium
@pytest.mark.trio
async def test_what_a_model_says_is_shown_and_never_run(tmp_path: Path) -> None:
    async with (
        served_http(batcher=Hostile()) as served,
        open_page(served.gateway.address + "/compare", tmp_path) as page,
    ):
        await page.evaluate("document.querySelector('.run').click()")
        await page.until("document.querySelector('.state').textContent === 'done'")
        assert await page.evaluate("document.querySelector('.answer').textContent") == HOSTILE
        assert await page.evaluate("document.querySelectorAll('.answer img, .answer script').length") == 0
        assert await page.evaluate("document.title") == "genbatch playground"


MARKDOWN = """# Title

Some **strong** and *soft* `code`, a_snake_name, 2 * 3 * 4.

1. one
   - inner
2. two

```py
x = "<b>"
```

| a | b |
|---|---|
| 1 | 2 |

See [here](https://example.org/x) or https://example.org/y."""
NASTY = (
    HOSTILE,
    "[x](javascript:document.title='owned') [y](data:text/html,<script>1</script>) ![z](javascript:alert(1))",
    "[x](https://a.example/\"onclick=\"document.title='owned') <a href=javascript:1>",
    f"```{HOSTILE}\n{HOSTILE}\n```",
    f"`{HOSTILE}` **{HOSTILE}** # {HOSTILE}",
    f"- {HOSTILE}\n> {HOSTILE}\n\n|{HOSTILE}|b|\n|---|---|\n|{HOSTILE}|c|",
    "&lt;img src=x onerror=alert(1)&gt;",
    "  - indented first\n- second",
    *(
        mark * 20_000
        for mark in ("*", "_", "`", "[", "](", "![", "~", "> ", "- ", "|", "#", "1. ", "\\", "**a ", "[a](", "* a\n")
    ),
)


class Saying(ScriptedBatcher):
    """Serves some models, and repeats the prompt, character by character where it is short."""

    def __init__(self, *models: str) -> None:
        super().__init__()
        self.models = models

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        one = {"n_parallel": 2, "runner": "script", "requests_running": 0, "requests_waiting": 0, "kv_blocks_max": 8}
        one |= {"kv_blocks_used": 2, "generation_tokens": 5, "mean_batch_size": 1.5}
        match request:
            case Generate():
                self.requests.append(request)
                held = Held(request, from_)
                text = (request.request.messages or [])[-1].content or ""
                for piece in text if len(text) < 1000 else [text]:
                    held.emit(str(piece))
                return held.result()
            case ModelsRequest():
                return Models(models=tuple(msgspec.structs.replace(CARD, id=name) for name in self.models))
            case StatsRequest() if len(self.models) == 1:
                return {**one, "model": self.models[0]}
            case StatsRequest():
                first, *others = self.models
                down = {name: {"engine": "down", "model": name} for name in others}
                total = {name: value for name, value in one.items() if type(value) is int}
                return {**total, "by_model": {first: {**one, "model": first}, **down}}
        return await super().handle_call(request, from_)


@needs_chromium
@pytest.mark.trio
async def test_markdown_of_a_model_is_shown_as_elements_and_html_in_it_as_text(tmp_path: Path) -> None:
    script = """(async () => {
      const { Markdown } = await import("/markdown.js");
      const shows = (source) => {
        const element = document.body.appendChild(document.createElement("div"));
        const shown = new Markdown(element);
        if (source.length < 1000) for (let end = 1; end < source.length; end++) shown.show(source.slice(0, end));
        shown.show(source);
        return element;
      };
      const good = shows(%s);
      const count = (element, names) => element.querySelectorAll(names).length;
      return [
        ["h3", "strong", "em", "ol > li", "ol ul li", "pre code", "td", ".copy", "p > code"].map((name) =>
          count(good, name)),
        [...good.querySelectorAll("a")].map((a) => [a.href, a.rel, a.target]),
        good.querySelector("pre").textContent,
        good.querySelector("p").textContent,
        %s.map((source) => {
          const element = shows(source);
          const links = [...element.querySelectorAll("a")].filter((a) => !/^https:/.test(a.protocol));
          const names = [...element.querySelectorAll("*")].flatMap((each) => each.getAttributeNames());
          const foreign = count(element, "img, script, b, iframe");
          return [foreign, links.length, names.some((name) => name.startsWith("on"))];
        }),
      ];
    })()"""
    async with served_http() as served, open_page(served.gateway.address, tmp_path) as page:
        counts, links, code, paragraph, nasty = await page.evaluate(script % (json.dumps(MARKDOWN), json.dumps(NASTY)))
        assert counts == [1, 1, 1, 2, 1, 1, 2, 1, 1]
        assert links == [[f"https://example.org/{x}", "noopener noreferrer nofollow", "_blank"] for x in "xy"]
        assert code == 'x = "<b>"'
        assert paragraph == "Some strong and soft code, a_snake_name, 2 * 3 * 4."
        assert nasty == [[0, 0, False]] * len(NASTY)
        assert await page.evaluate("document.title") == "genbatch chat" and page.problems == []


@needs_chromium
@pytest.mark.trio
async def test_a_reader_chooses_among_several_models_on_both_pages(tmp_path: Path) -> None:
    batcher = Saying("first", "second")
    async with served_http(batcher=batcher) as served, open_page(served.gateway.address, tmp_path) as page:
        await page.until("document.getElementById('models').options.length === 2")
        assert await page.evaluate("document.getElementById('models').closest('label').hidden") is False
        await page.evaluate("document.getElementById('models').value = 'second'")
        await page.evaluate("document.getElementById('message').value = '**Hi**'")
        await page.evaluate("document.getElementById('ask').requestSubmit()")
        await page.until("document.querySelector('.turn.assistant[aria-busy=false] strong')?.textContent === 'Hi'")
        await page.send("Page.navigate", url=served.gateway.address + "/compare")
        await page.until("document.querySelector('.column select')?.options.length === 2")
        assert await page.evaluate("document.getElementById('health').textContent") == "ready"
        shown = await page.evaluate(
            "['model', 'slots', 'batch', 'kv'].map(id => document.getElementById(id).textContent)"
        )
        assert shown == ["first · script, second · down", "2", "1.50 / \N{EN DASH}", "25 %"]
        await page.evaluate("document.querySelectorAll('.column select')[1].value = 'second'")
        await page.evaluate("document.getElementById('run-all').click()")
        await page.until("[...document.querySelectorAll('.column .state')].every(each => each.textContent === 'done')")
        asked = [message.request.model for message in batcher.requests]
        assert asked[0] == "second" and sorted(map(str, asked[1:])) == ["first", "first", "first", "second"]
        assert page.problems == []


@needs_chromium
@pytest.mark.trio
@pytest.mark.parametrize("models", [("only",), ("smollm2-135m-instruct", "llama-3.1-8b-instruct")])
async def test_no_page_is_wider_than_a_phone(models: tuple[str, ...], tmp_path: Path) -> None:
    long = MARKDOWN + "\n\n```\n" + "wide " * 40 + "\n```\n\n" + "word" * 100
    async with served_http(batcher=Saying(*models)) as served, open_page(served.gateway.address, tmp_path) as page:
        metrics = {"width": 375, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        await page.send("Emulation.setDeviceMetricsOverride", **metrics)
        await page.evaluate(f"document.getElementById('message').value = {json.dumps(long)}")
        await page.evaluate("document.getElementById('ask').requestSubmit()")
        await page.until("document.querySelector('.turn.assistant[aria-busy=false] .code')")
        for path in ("/", "/compare", "/docs"):
            if path != "/":
                await page.send("Page.navigate", url=served.gateway.address + path)
                await page.until(f"location.pathname === '{path}' && document.readyState === 'complete'")
            if path == "/compare":
                await page.until("Number(document.getElementById('slots').textContent) > 0")
                await page.evaluate("document.querySelector('.run').click()")
                await page.until("document.querySelector('.column .state').textContent === 'done'")
            await page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
            width = "[document.documentElement.scrollWidth, innerWidth]"
            assert await page.evaluate(width) == [375, 375], path
            assert page.problems == []


TOOL = (
    '[{"type": "function", "function": {"name": "look", "strict": true, "parameters": {"type": "object", "properties": '
    '{"x": {"enum": [1]}}, "required": ["x"], "additionalProperties": false}}}]'
)


class Calling(ScriptedBatcher):
    """Asks for a call at first, and says what markup would be once it is answered."""

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        if not isinstance(request, Generate):
            return await super().handle_call(request, from_)
        held = Held(request, from_)
        asked = request.request.messages or []
        if request.request.tools and asked[-1].role == "user":
            piece = ToolCallDelta(index=0, id="abc", name="look", arguments='{"x": 1}')
            assert request.on_token is not None
            request.on_token(Token(text="", token_id=1, index=0, tool_calls=(piece,)))
            return msgspec.structs.replace(
                held.result(),
                finish_reason="tool_calls",
                tool_calls=(ToolCall(id="abc", name="look", arguments='{"x": 1}'),),
            )
        held.emit(HOSTILE)
        return held.result()


@needs_chromium
@pytest.mark.trio
async def test_the_chat_keeps_its_history_asks_again_and_shows_calls(tmp_path: Path) -> None:
    turns = "[...document.querySelectorAll('.turn .text')].map(each => each.textContent)"
    idle = "!document.querySelector('[aria-busy=true]')"
    async with (
        served_http(batcher=Calling()) as served,
        open_page(served.gateway.address, tmp_path) as page,
    ):
        await page.until("document.getElementById('send')?.disabled === false")
        await page.evaluate("document.getElementById('message').value = 'Well?'")
        await page.evaluate("document.getElementById('ask').requestSubmit()")
        await page.until(f"{turns}.length === 2 && {idle}")
        assert await page.evaluate(turns) == ["Well?", HOSTILE]
        await page.evaluate("document.getElementById('again').click()")
        await page.until(f"{turns}.length === 2 && {idle} && {turns}[1] !== ''")
        assert await page.evaluate(turns) == ["Well?", HOSTILE]
        await page.evaluate(f"document.getElementById('tools').value = {TOOL!r}")
        await page.evaluate("document.getElementById('message').value = 'And now?'")
        await page.evaluate("document.getElementById('ask').requestSubmit()")
        await page.until("document.querySelector('.call button')")
        assert await page.evaluate("document.querySelector('.call pre').textContent") == '{"x": 1}'
        await page.evaluate("document.querySelector('.call textarea').value = 'seen'")
        await page.evaluate("document.querySelector('.call').requestSubmit()")
        await page.until(f"{turns}.length === 6 && {idle}")
        assert await page.evaluate(turns) == ["Well?", HOSTILE, "And now?", "", "seen", HOSTILE]
        assert await page.evaluate("document.title") == "genbatch chat" and page.problems == []
        await page.evaluate("document.getElementById('new').click()")
        assert await page.evaluate(turns) == []


class Cut(Calling):
    """Runs out of tokens within a call."""

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        if isinstance(request, Generate):
            self.requests.append(request)
        answer = await super().handle_call(request, from_)
        return msgspec.structs.replace(answer, finish_reason="length") if isinstance(request, Generate) else answer


@needs_chromium
@pytest.mark.trio
async def test_a_call_that_was_cut_short_is_no_part_of_the_conversation(tmp_path: Path) -> None:
    batcher = Cut()
    async with served_http(batcher=batcher) as served, open_page(served.gateway.address, tmp_path) as page:
        await page.until("document.getElementById('send')?.disabled === false")
        await page.evaluate(f"document.getElementById('tools').value = {TOOL!r}")
        for number, message in enumerate(("Well?", "And?"), 1):
            await page.evaluate(f"document.getElementById('message').value = {message!r}")
            await page.evaluate("document.getElementById('ask').requestSubmit()")
            await page.until(f"document.querySelectorAll('.turn').length === {2 * number}")
            await page.until("!document.querySelector('[aria-busy=true]')")
            assert await page.evaluate("document.getElementById('state').textContent !== 'failed'")
            assert await page.evaluate("document.querySelector('.call')") is None
        asked = batcher.requests[-1].request.messages
        assert asked is not None and [turn.content for turn in asked] == ["Well?", "And?"]


@pytest.mark.trio
async def test_docs_list_what_is_served() -> None:
    async with served_http() as served:
        document = (await served.client.get("/openapi.json")).json()
        page = (await served.client.get("/docs")).text
        for path in document["paths"]:
            assert path in page
            if "{" not in path:
                response = await served.client.request("PATCH", path)
                assert response.status_code == 405, path
        assert "<summary>The body of /v1/chat/completions;" in page
        assert "<td><code>number or null</code></td>" in page and "<code>array of object</code>" in page
        assert "| None" not in page and "openai_request." not in page, "types are JSON's, not Python's"
        assert "`" not in page and "each of the <code>messages</code> is checked" in page
        assert re.search(r"<code>min_tokens</code></td><td><code>integer[^<]*</code></td><td></td><td>\w", page)
        chat = document["components"]["schemas"]["ChatFields"]["properties"]
        assert {"messages", "tools", "tool_choice"} <= chat.keys()


@pytest.mark.trio
async def test_every_element_of_the_docs_is_closed() -> None:
    class Open(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.tags: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag not in ("meta", "link", "br", "input", "img"):
                self.tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.tags.pop() == tag

    async with served_http() as served:
        document = Open()
        document.feed((await served.client.get("/docs")).text)
        document.close()
    assert not document.tags
