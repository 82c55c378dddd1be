"""Grammars to masks: what may come next, what is refused and why, and how long a hostile one may take."""

import json
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.sampling import grammar, grammar_compiler
from genbatch.nif.sampling.choice import forbid, sample
from genbatch.nif.sampling.grammar import FIRST_S, GrammarConstraint
from genbatch.nif.sampling.grammar_compiler import MAX_CACHED, GrammarCompiler, GrammarError
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState, SamplingParams

END = 2
FORCING = ("the quick (brown|black) fox", "[0-9]{3}-constant", "a{20}(b|c)d{5}")
HOSTILE = "(ab|c)*" * 9000  # seconds, if it were let


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Model]) -> Model:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def compiler(model: Model) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(model, max_s=1.0)
    yield compiler
    compiler.close()


def one(compiler: GrammarCompiler, kind: str, text: str) -> GrammarConstraint:
    [constraint] = compiler.compile(kind, text, b"", 1)
    return constraint


def allowed(constraint: GrammarConstraint) -> list[int]:
    constraint.prepare()
    assert constraint.fault is None, constraint.fault
    bits = np.unpackbits(constraint.allowed.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def write(constraint: GrammarConstraint, model: Model, choose: Callable[[list[int]], int], most: int = 200) -> str:
    """A text that goes where `choose` says until it ends."""
    tokens: list[int] = []
    for _ in range(most):
        token_id = choose(allowed(constraint))
        if token_id == END:
            return model.tokenizer.decode(tokens)
        tokens.append(token_id)
        constraint.accept(token_id)
    raise AssertionError("it does not end")


def test_only_the_grammar_s_tokens_may_come_and_the_end_only_where_it_is_complete(
    compiler: GrammarCompiler, model: Model
) -> None:
    constraint = one(compiler, "regex", "[0-9]{2}")
    texts = [model.tokenizer.decode([token_id]) for token_id in allowed(constraint)]
    assert texts and all(re.fullmatch("[0-9]{1,2}", text) for text in texts)
    for digit in model.tokenizer.encode("4") + model.tokenizer.encode("2"):
        assert END not in allowed(constraint)
        constraint.accept(digit)
    assert allowed(constraint) == [END]


REGEXES = st.recursive(
    st.sampled_from(["a", "b", "[0-9]", "é", "世", "(xy)", "[a-c]"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        inner.map(lambda regex: f"({regex}){{0,2}}"),
        inner.map(lambda regex: f"({regex})?"),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=40)
@given(regex=REGEXES, seed=st.integers(0, 2**32))
def test_whatever_is_drawn_matches_the_whole_regex(
    compiler: GrammarCompiler, model: Model, regex: str, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    text = write(one(compiler, "regex", regex), model, lambda ids: int(draw.choice(ids)))
    assert re.fullmatch(regex, text), (regex, text)


def test_a_fork_goes_its_own_way(compiler: GrammarCompiler, model: Model) -> None:
    first, second = compiler.compile("regex", "ab|cd", b"", 2)
    [a], [c] = model.tokenizer.encode("a"), model.tokenizer.encode("c")
    first.accept(a)
    second.accept(c)
    assert model.tokenizer.encode("b") == allowed(first)
    assert model.tokenizer.encode("d") == allowed(second)


@given(st.sampled_from(FORCING), st.randoms(use_true_random=False))
def test_forced_tokens_may_follow_one_another(
    compiler: GrammarCompiler, model: Model, regex: str, random: Random
) -> None:
    constraint = one(compiler, "regex", regex)
    num_forced = 0

    def choose(tokens: list[int]) -> int:
        nonlocal num_forced
        fork = constraint.fork()
        for token_id in constraint.forced():
            num_forced += 1
            assert token_id in allowed(fork)
            fork.accept(token_id)
        assert allowed(constraint) == tokens  # the fork did not move it
        return random.choice(tokens)

    assert re.fullmatch(regex, write(constraint, model, choose))
    assert num_forced


def test_the_end_is_forced_where_nothing_else_may_follow(compiler: GrammarCompiler, model: Model) -> None:
    constraint = one(compiler, "regex", "ab|cd")
    allowed(constraint)
    assert constraint.forced() == []
    for token_id in model.tokenizer.encode("ab"):
        constraint.accept(token_id)
    allowed(constraint)
    assert constraint.forced() == [END]


def test_a_long_forced_text_is_found_once_and_again_only_after_another_token(
    compiler: GrammarCompiler, model: Model
) -> None:
    constraint = one(compiler, "regex", "x" + "abcd" * 200 + "y")
    matcher, calls = constraint._matcher, 0

    class Counting:
        def __getattr__(self, name: str) -> Any:
            nonlocal calls
            calls += name == "compute_ff_tokens"
            return getattr(matcher, name)

    allowed(constraint)
    constraint._matcher = Counting()  # type: ignore[assignment]
    found = len(constraint.forced())
    for _ in range(5):
        constraint.accept(constraint.forced()[0])
        assert constraint.forced()
    assert calls == 1 and len(constraint.forced()) == found - 5
    [whole] = constraint.forced()[:1]
    constraint.accept(whole + 1)
    assert constraint._forced == []


def test_finding_forced_tokens_has_a_budget_and_no_effect_on_the_masks(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "FORCING_S", 0.001)
    monkeypatch.setattr(grammar, "PER_TOKEN_S", 0.0)
    constraint = one(compiler, "regex", "abcdef")
    allowed(constraint)
    constraint._forcing_s = 0.002
    assert constraint.forced() == []
    assert constraint.fault is None


def test_a_state_is_a_function_of_its_tokens_however_often_it_is_prepared(
    compiler: GrammarCompiler, model: Model
) -> None:
    tokens = [model.tokenizer.encode(character)[0] for character in '{"a": 1']
    often, once = compiler.compile("json_schema", '{"type": "object"}', b"", 2)
    for token_id in tokens:
        often.accept(token_id)
        often.prepare()
        once.accept(token_id)
    assert allowed(often) == allowed(once)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("json_schema", "{", "line 1 column 2"),
        ("json_schema", '{"type": "nonsense"}', "Invalid type: nonsense"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "no token may come next"),
        # A schema must not switch the check off.
        ("json_schema", '{"x-guidance": {"lenient": true}, "type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"oneOf": [{"minLength": 1}, {"type": "string"}]}', "Write anyOf, or require a property"),
        ("lark", 'start: j\nj: %json {"type": "zz"}', "^Invalid type: zz$"),
        ("grammar", "start: nowhere", "nowhere"),
        ("grammar", "hello", "Failed to convert"),
        ("grammar", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000, "recursion"),
        ("regex", HOSTILE, "takes more than 1 s"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    compiler: GrammarCompiler, kind: str, text: str, reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        one(compiler, kind, text)
    assert len(str(caught.value)) <= 400 and "\n" not in str(caught.value)


def test_a_refusal_is_remembered_and_the_next_grammar_compiled(compiler: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match="takes more than"):
            one(compiler, "regex", HOSTILE)
    assert not compiler._child.is_running  # killed over the first, not started again for the second
    assert allowed(one(compiler, "regex", "after a kill"))


def test_the_checker_outlives_signals_that_end_a_service(compiler: GrammarCompiler) -> None:
    assert allowed(one(compiler, "regex", "before the signals"))
    (child,) = compiler._child._running
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        child.send_signal(number)
    assert allowed(one(compiler, "regex", "behind the signals"))
    assert compiler._child._running == [child] and child.poll() is None


def test_a_hostile_grammar_s_tokens_have_a_budget(compiler: GrammarCompiler, model: Model) -> None:
    constraint = one(compiler, "grammar", 'start: a\na: a a | "x" |\n')
    [x] = model.tokenizer.encode("x")
    slow = False
    started = time.thread_time()
    for _ in range(2000):
        constraint.accept(x)
        slow = slow or constraint.is_slow
        constraint.prepare()
        if constraint.fault is not None:
            break
    assert slow and constraint.fault is not None
    assert time.thread_time() - started < 20 * FIRST_S
    constraint.prepare()  # stays as it is


def test_the_cache_is_bounded_and_each_owner_has_its_own(compiler: GrammarCompiler) -> None:
    for number in range(MAX_CACHED + 3):
        compiler.compile("regex", f"{number}", b"one", 1)
    assert len(compiler._cached) == MAX_CACHED
    before = set(compiler._cached)
    compiler.compile("regex", f"{MAX_CACHED}", b"one", 1)
    assert set(compiler._cached) == before
    compiler.compile("regex", f"{MAX_CACHED}", b"two", 1)
    assert set(compiler._cached) != before


@pytest.mark.parametrize("name", ["host", "device"])
def test_both_samplers_keep_to_the_constraint_and_leave_other_rows_alone(
    compiler: GrammarCompiler, model: Model, name: str
) -> None:
    logits = torch.randn(4, model.vocab_size, generator=torch.manual_seed(0))
    raw = logits.clone()
    greedy, warm = SamplingParams(seed=1, logprobs=0), SamplingParams(seed=1, temperature=3.0)
    digit, letter = one(compiler, "regex", "[0-9]"), one(compiler, "regex", "[a-z]+")
    broken = one(compiler, "regex", "z")
    broken.accept(END)
    states = [SamplerState(greedy, ()), SamplerState(greedy, (), digit), SamplerState(warm, (), letter)]
    states.append(SamplerState(greedy, (), broken))
    if name == "host":
        free, number, word, fault = sample(logits.numpy(), states, [5, 5, 5, 5])
    else:
        from genbatch.nif.sampling.device_draws import sample_on_device  # through Triton's interpreter without a GPU

        free, number, word, fault = sample_on_device(logits, states, [5, 5, 5, 5])
    assert torch.equal(logits, raw)
    assert isinstance(free, Sampled) and free.token_id == int(raw[0].argmax())
    ids = allowed(digit)
    assert isinstance(number, Sampled) and number.token_id == ids[int(raw[1, ids].argmax())]
    assert number.logprob == pytest.approx(float(raw[1].log_softmax(-1)[number.token_id]), abs=1e-5)
    assert isinstance(word, Sampled) and word.token_id in allowed(letter)
    assert isinstance(fault, SampleFault) and fault.by_request and "followed" in fault.reason


def test_logits_wider_than_the_tokenizer_are_never_chosen_beyond_it(compiler: GrammarCompiler, model: Model) -> None:
    logits = np.zeros((1, model.vocab_size - 3), np.float32)
    forbid(logits, [one(compiler, "regex", "(.|\n)*")])
    assert np.isfinite(logits).sum() > 100
    assert not np.isfinite(logits[0, 0])  # a special token is no text


def test_the_checker_s_process_imports_neither_torch_nor_an_event_loop() -> None:
    import subprocess

    program = "import sys, genbatch.nif.sampling.grammar_child\n"
    program += "print(sorted({'torch', 'trio', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


def test_the_process_that_tries_grammars_may_grow_so_much_and_no_more(compiler: GrammarCompiler) -> None:
    assert allowed(one(compiler, "regex", "a limit is set"))
    (child,) = compiler._child._running
    soft, _ = resource.prlimit(child.pid, resource.RLIMIT_AS)
    assert 0 <= soft - grammar_compiler.MAX_MEMORY < 2**40
