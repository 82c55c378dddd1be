"""Chat templates that mean harm end alone and with a named error; the others render what transformers renders."""

import gc
import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.text import templates
from genbatch.nif.text.template_child import MAX_PROMPT, PROMPT_PER_BYTE
from genbatch.nif.text.templates import (
    MAX_RENDERINGS,
    ChatTemplateError,
    NothingToContinue,
    TemplateEnded,
    TemplateRenderer,
)
from genbatch.nif.text.tokenizer import check_template


def times(count: int, body: str) -> str:
    """A template that does something again and again, with a namespace of lists, texts and a number."""
    made = "{% set ns = namespace(x=[1], y=[1], text='ab', k=n + 9) %}"
    return made + "{% for i in range(" + str(count) + ") %}" + body + "{% endfor %}"


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
# Does harm where the first message says so.
EITHER = "{% if messages[0].content == 'loop' %}" + LOOP + "{% else %}" + PLAIN + "{% endif %}"

DOUBLE = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"

# What each template does, and what the error says of it; some are refused before they are run.
LIMIT, MEMORY = "takes more than", "takes (too much|more than .*) memory|takes more than"
HARMFUL = {
    "nested loops": (LOOP, LIMIT),
    "a loop over a product": ("{% for a in [0] * (n * 10**8) %}{% endfor %}", MEMORY),
    "a huge range": ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
    "text times a number": ("{{ 'a' * 10**9 }}", MEMORY),
    "text times a variable": ("{{ 'a' * (n * 10**9) }}", MEMORY),
    "text that doubles": (times(40, "{% set ns.text = ns.text ~ ns.text %}"), MEMORY),
    "a number that grows": (times(40, "{% set ns.k = ns.k * ns.k %}"), LIMIT),
    "a power": ("{{ (n * 10) ** (n * 10**8) }}", LIMIT),
    "a power of constants": ("{{ 10 ** (10 ** 8) }}", LIMIT),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "a macro that branches": ("{% macro f(k) %}{{ f(k - 1) ~ f(k - 1) if k }}{% endmacro %}{{ f(60) }}", LIMIT),
    "center": ("{{ 'a' | center(n * 10**10) }}", MEMORY),
    "indent": ("{{ 'a\nb' | indent(n * 10**10) }}", MEMORY),
    "format": ("{{ '%1000000000d' | format(n) }}", MEMORY),
    "str.format": ("{{ '{:>1000000000}'.format(n) }}", MEMORY),
    "str.ljust": ("{{ 'a'.ljust(n * 10**10) }}", MEMORY),
    "str.expandtabs": ("{{ '\t'.expandtabs(n * 10**9) }}", MEMORY),
    "replace": ("{{ ('a' * (n * 99999)) | replace('a', 'b' * (n * 99999)) }}", MEMORY),
    "join": ("{{ range(n * 99999) | join('b' * (n * 99999)) }}", MEMORY),
    "lipsum": ("{{ lipsum(n=10**8) }}", LIMIT),
    "a batch": ("{{ [1] | batch(n * 10**9, 0) | list }}", MEMORY),
    "slices": ("{{ [1] | slice(n * 10**9) | list }}", MEMORY),
    "a sort of text": (times(99999, "{{ (ns.text * 99999) | sort | first }}"), LIMIT),
    "JSON of what doubles": (times(60, DOUBLE) + "{{ ns.x | tojson }}", MEMORY),
    "JSON of what is deep": (times(99999, "{% set ns.x = [ns.x] %}") + "{{ ns.x | tojson }}", "recursion|" + LIMIT),
    "equality of what doubles": (times(60, DOUBLE) + "{{ ns.x == ns.y }}", LIMIT),
    "a walk over attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "a change of the messages": ("{{ messages.append(1) }}", "unsafe"),
    "an include": ("{% include 'a' %}", "loader"),
    "an import": ("{% import 'a' as b %}", "loader"),
    "urlize": (times(9999, "{{ ('a@.' * (n * 99999)) | urlize }}"), MEMORY),
    "word wrap": (times(99999, "{{ (ns.text * 99999) | wordwrap(1) | length }}"), LIMIT),
    "an exception of great length": ("{{ raise_exception('a' * (n * 10**6)) }}", "aaa…$"),
    "an exception that is no text": ("{{ raise_exception([messages] * (n * 10**7)) }}", MEMORY + "|…$"),
    "much output": (times(99999, "{{ ns.text * 99999 }}"), "too long|" + MEMORY),
}  # fmt: skip


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer({"default": EITHER})


def render(renderer: TemplateRenderer, content: str = "hi", **variables: Any) -> str:
    rendering = renderer.start("default", [[{"role": "user", "content": content}]], variables)
    rendering.wait()
    return rendering.prompt(0)


@pytest.mark.parametrize("kind", HARMFUL)
def test_a_template_that_means_harm_ends_with_an_error_that_says_why(kind: str) -> None:
    source, fault = HARMFUL[kind]
    with pytest.raises(ChatTemplateError, match=f"(?s){fault}") as caught:
        render(TemplateRenderer({"default": source}), n=1)
    assert len(str(caught.value)) < 500


def test_a_source_that_is_too_long_or_too_deep_is_refused(tmp_path: Path) -> None:
    for source in (
        "a" * (templates.MAX_SOURCE + 1),
        "{{ " + "(" * 50_000,
        "{% if a %}" * 5000,
        "{{ " + "-" * 90_000 + "1 }}",
    ):
        with pytest.raises(ChatTemplateError):
            check_template(source)
    check_template(PLAIN)


def test_others_go_on_while_one_loops(renderer: TemplateRenderer) -> None:
    looping = [renderer.start("default", [[{"role": "user", "content": "loop"}]], {}) for _ in range(3)]
    assert not any(one.wait(0.0) for one in looping)
    assert render(renderer) == "user: hi\n"
    for one in looping:
        assert one.wait()
        with pytest.raises(ChatTemplateError, match=LIMIT):
            one.prompt(0)


def test_the_oldest_makes_room_where_too_many_loop(renderer: TemplateRenderer) -> None:
    looping = [renderer.start("default", [[{"role": "user", "content": "loop"}]], {}) for _ in range(MAX_RENDERINGS)]
    assert not looping[0].wait(0.0)
    assert render(renderer) == "user: hi\n"
    with pytest.raises(TemplateEnded):
        assert looping[0].wait() and looping[0].prompt(0)
    for one in looping[1:]:
        one.wait()


def test_a_prompt_has_as_many_characters_as_the_limit_says(renderer: TemplateRenderer) -> None:
    sized = TemplateRenderer({"default": "{{ messages[0].content[0] * size }}"})
    assert len(render(sized, "a", size=MAX_PROMPT)) == MAX_PROMPT
    with pytest.raises(ChatTemplateError, match="too long"):
        render(sized, "a", size=2 * MAX_PROMPT)
    assert len(render(sized, "a" * MAX_PROMPT, size=PROMPT_PER_BYTE * MAX_PROMPT)) == PROMPT_PER_BYTE * MAX_PROMPT


def test_what_is_no_json_is_refused(renderer: TemplateRenderer) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for variables in ({"x": deep}, {"x": {(1, 2): 3}}):
        with pytest.raises(ChatTemplateError, match="JSON"):
            render(renderer, **variables)
    assert render(renderer, "\ud800") == "user: \ud800\n"


# Processes


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def root() -> int:
    process: Any = templates._root(os.getpid())._process
    return int(process.pid)


def keepers() -> set[int]:
    return set(children(root()))


@pytest.mark.parametrize("victim", ["root", "keeper", "worker"])
def test_a_process_that_is_killed_is_replaced(victim: str) -> None:
    before = keepers() if victim != "root" else set()
    killed = TemplateRenderer({"default": PLAIN})
    assert render(killed) == "user: hi\n"
    keeper = (keepers() - before).pop()
    for pid in {"root": [root(), keeper], "keeper": [keeper], "worker": children(keeper)}[victim]:
        os.kill(pid, signal.SIGKILL)
    # A worker that has just been killed may still take the job: its end is an error of that job alone.
    for _ in range(3):
        try:
            assert render(killed) == "user: hi\n"
            break
        except ChatTemplateError:
            continue
    else:
        pytest.fail("it renders no more")


def test_a_process_that_is_killed_while_it_compiles_makes_no_template_a_bad_one() -> None:
    before = keepers()
    killed = TemplateRenderer({"default": PLAIN})
    killed.prepare()
    while not (started := keepers() - before):
        pass
    os.kill(started.pop(), signal.SIGKILL)
    assert killed.fault("default") == "" and render(killed) == "user: hi\n"


def test_processes_end_with_their_renderer() -> None:
    before = keepers()
    renderer = TemplateRenderer({"default": PLAIN})
    render(renderer)
    keeper = (keepers() - before).pop()
    ends = [os.pidfd_open(pid) for pid in (keeper, *children(keeper))]
    assert len(ends) > 2
    del renderer
    gc.collect()
    for end in ends:
        assert select.select([end], [], [])[0]  # readable once the process has ended
        os.close(end)


# The same text as with transformers

CONSTRUCTS = {
    "trimmed blocks": "{% for m in messages %}\n  {% if m.name %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "loop controls": "{% for m in messages %}{{ m }}{% if m.name %}{% break %}{% endif %}{% continue %}x{% endfor %}",
    "generation": "{% set a = 1 %}{% for m in messages %}{% generation %}{{ m }}{{ a }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(self=2) %}{% for m in messages %}{% set ns.n = m.name %}{% endfor %}{{ ns.n }}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=True) }}{{ tools | tojson(True) }}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys(['a'], 2) }}{{ dict() }}",
    "documents": "{{ documents is none }}{{ documents is defined }}{{ tools is none }}{{ bos_token is defined }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    "none": "{% for m in messages %}{{ m.name is defined }}{{ m.keys() | list }}{% endfor %}",
    "prompt": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}{{ add_generation_prompt }}",
    "escapes": "{{ '<&>' | e }}{{ '<b>' }}{{ messages[0].content | upper | replace('A', 'b') }}",
    "date": "{{ strftime_now('%Y') }}",
    "undefined": "{{ nothing }}{{ nothing is undefined }}{{ messages[0].nothing }}",
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT},
    optional={
        "name": TEXT,
        "reasoning_content": TEXT,
        "thinking": TEXT,
        "reasoning": TEXT,
        "tool_calls": st.lists(st.fixed_dictionaries({"id": TEXT, "n": st.integers(), "x": st.floats()}), max_size=1),
    },
)
RENDERERS = TemplateRenderer(CONSTRUCTS)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(CONSTRUCTS)),
    messages=st.lists(MESSAGE, min_size=1, max_size=4),
    goes_on=st.booleans(),
    tools=st.sampled_from([None, [{"type": "function", "function": {"name": "é", "parameters": {}}}]]),
)
def test_a_prompt_is_what_transformers_renders(
    name: str, messages: list[dict[str, Any]], goes_on: bool, tools: list[dict[str, Any]] | None
) -> None:
    try:
        theirs: str | None = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=CONSTRUCTS[name],
            continue_final_message=goes_on,
            add_generation_prompt=not goes_on,
        )[0][0]
    except (ValueError, TypeError):
        theirs = None
    try:
        rendering = RENDERERS.start(name, [messages], {"documents": None, "tools": tools}, goes_on=goes_on)
        rendering.wait()
        ours: str | None = rendering.prompt(0)
    except ChatTemplateError:
        ours = None
    assert ours == theirs


@pytest.mark.parametrize("content", ["", " ", "x", " x "])
@pytest.mark.parametrize("name", ["json", "generation", "loop controls", "prompt", "trimmed blocks"])
def test_a_message_is_continued_where_transformers_continues_it(name: str, content: str) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi", "name": "a"},
        {"role": "assistant", "content": content, "name": "b"},
    ]
    try:
        theirs = render_jinja_template([messages], chat_template=CONSTRUCTS[name], continue_final_message=True)[0][0]
    except ValueError:
        with pytest.raises(NothingToContinue, match="does not name `content`"):
            RENDERERS.start(name, [messages], {"documents": None, "tools": None}, goes_on=True)
        return
    rendering = RENDERERS.start(name, [messages], {"documents": None, "tools": None}, goes_on=True)
    rendering.wait()
    assert rendering.prompt(0) == theirs


def test_the_variables_that_a_template_reads_are_known(renderer: TemplateRenderer, smollm2: Model) -> None:
    assert renderer.variables("default") == {"messages", "range"} - {"range"}
    assert "add_generation_prompt" in smollm2.tokenizer.renderer.variables("default")
    assert TemplateRenderer({"default": "{{ a "}).variables("default") == frozenset()
