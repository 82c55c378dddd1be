"""TritonRunner.launch under Triton's interpreter: steps that feed one another, eagerly and through padded graphs."""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import triton

from genbatch.nif.context import Context
from genbatch.nif.context.overlapped_run import OverlappedRun
from genbatch.nif.engine_options import GraphOptions
from genbatch.nif.errors import BatchError
from genbatch.nif.runner import BatchLimits, Entry, Logits, RaggedBatch, Rows
from genbatch.nif.runners import launches, prompt_graphs
from genbatch.nif.runners.device_lora import DeviceLora
from genbatch.nif.runners.launches import CapturePlace, DecodeGraphs, DecodeStep, Launches, tables_offset
from genbatch.nif.runners.lean_llama import LeanStep
from genbatch.nif.runners.prompt_graphs import PromptGraphs, most_logit_rows
from genbatch.nif.runners.triton_runner import TritonRunner
from genbatch.nif.sampling.sampler import Sampled, SamplerState, SamplingParams
from tests.nif.without_waiting import without_waiting

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="these models are on the CPU, where only the interpreter runs kernels"
)

BLOCK_SIZE = 4
PROMPTS = [[5, 17, 100, 42, 9, 250, 33], [200, 3, 11]]
PARAMS = [SamplingParams(seed=1), SamplingParams(seed=2, temperature=1.2, top_p=0.9)]
STEPS = 3


class EagerStep:
    """Stands for a captured graph: holds its inputs' place, and computes anew at each replay."""

    captured = 0
    times: ClassVar[dict[str, float]] = {}

    def __init__(self, sample: DecodeStep, decode: Any, place: CapturePlace) -> None:
        EagerStep.captured += 1
        self._inputs = place.inputs
        self._tables_at = tables_offset(sample)
        self._step = place.upload.upload_step(sample, into=self._inputs)
        self._tables = self._step.batch.block_tables
        self._decode = decode
        self.replay()  # as warming up does

    load = launches.CapturedStep.load

    def replay(self) -> torch.Tensor:
        logits: torch.Tensor = self._decode(self._step)
        return logits

    def seconds(self) -> float:
        """As long as a test says."""
        return EagerStep.times[self._decode.keywords["products"]]

    def finish(self) -> None:
        """Nothing goes on by itself here."""


def a_place(runner: TritonRunner, limits: BatchLimits) -> CapturePlace:
    """Where nothing is captured; all steps read one input."""
    nothing: Any = None
    return CapturePlace(nothing, None, torch.empty(2**16, dtype=torch.uint8), runner._upload, limits)


@pytest.fixture(name="eager_graphs")
def eager_graphs_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[TritonRunner, GraphOptions], None]:
    return eager_graphs(monkeypatch)


def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[[TritonRunner, GraphOptions], None]:
    """Gives a runner graphs that are replayed without a GPU; to be called once it has its pool."""
    monkeypatch.setattr(launches, "CapturedStep", EagerStep)
    monkeypatch.setattr(prompt_graphs, "CapturedStep", EagerStep)

    def give(runner: TritonRunner, options: GraphOptions) -> None:
        cpu, limits = torch.device("cpu"), runner._limits
        assert isinstance(limits, BatchLimits)
        place = a_place(runner, limits)
        runner._drawn = torch.zeros(options.max_batch_size, dtype=torch.int64)
        lora = runner._lora if isinstance(runner._lora, DeviceLora) else None
        runner._graphs = DecodeGraphs(options, runner._decode, runner._drawn, place, lora=lora)
        runner._launches = Launches(cpu, runner._drawn, runner._upload, runner._decode, runner._graphs)
        if options.max_prompt_tokens:
            runner._logits = torch.empty(
                (most_logit_rows(options.max_prompt_tokens, options.max_batch_size), runner.vocab_size)
            )
            graphs = PromptGraphs(options, runner._evaluate, place)
            graphs.warm_up()
            runner._prompt_graphs = graphs

    return give


def begun(model: Any, runner: Any) -> tuple[Context, list[Entry], list[SamplerState]]:
    context = Context(model, runner, n_ctx=96, n_parallel=2, block_size=BLOCK_SIZE)
    entries = []
    for seq_id, prompt in enumerate(PROMPTS):
        context.prefill(prompt[:-1], seq_id, 0)
        entries.append(Entry(seq_id, prompt[-1:], len(prompt) - 1))
    return context, entries, [SamplerState(params, ()) for params in PARAMS]


def run_of(context: Context, entries: list[Entry], states: list[SamplerState]) -> list[list[int]]:
    run = context.decode_run(entries, states, max_steps=STEPS)
    assert isinstance(run, OverlappedRun)
    try:
        return [[draw.token_id for draw in run.step() if isinstance(draw, Sampled)] for _ in range(STEPS)]
    finally:
        run.close()


def single_steps(context: Context, entries: list[Entry], states: list[SamplerState]) -> list[list[int]]:
    drawn = []
    for _ in range(STEPS):
        step = context.step(entries, states, with_logits=False)[1]
        drawn.append([draw.token_id for draw in step if isinstance(draw, Sampled)])
        entries = [Entry(e.seq_id, [token], e.n_past + 1) for e, token in zip(entries, drawn[-1], strict=True)]
    return drawn


@pytest.fixture(scope="module")
def plain(tiny_model: Any) -> Callable[[str, str], tuple[list[list[int]], Context]]:
    """plain("lean", "llama") is what steps draw that wait for one another, and their context."""
    made: dict[tuple[str, str], tuple[list[list[int]], Context]] = {}

    def find(tier: Any, family: str) -> tuple[list[list[int]], Context]:
        if (tier, family) not in made:
            model = tiny_model(family)
            context, entries, states = begun(model, TritonRunner(model, tier=tier))
            made[tier, family] = single_steps(context, entries, states), context
        return made[tier, family]

    return find


@pytest.mark.parametrize(
    ("tier", "family"), [("lean", "llama"), ("lean", "mistral"), ("general", "gemma2"), ("general", "gpt_oss")]
)
def test_h15_launched_steps_draw_what_single_steps_draw(tier: Any, family: str, tiny_model: Any, plain: Any) -> None:
    model, (expected, _) = tiny_model(family), plain(tier, family)
    context, entries, states = begun(model, TritonRunner(model, tier=tier))
    assert run_of(context, entries, states) == expected
    context.kv.check_integrity()


def test_h14_h15_steps_launched_through_padded_graphs_draw_the_same(
    tiny_model: Any, eager_graphs: Any, plain: Any
) -> None:
    """Graphs of 4 rows for 2 sequences, of 8 positions, so that one is captured while a step is under way."""
    model, (expected, plain_context) = tiny_model("llama"), plain("lean", "llama")
    runner = TritonRunner(model)
    context, entries, states = begun(model, runner)
    options = GraphOptions(q_padding_interval_size=4, kv_padding_interval_size=8, max_batch_size=4)
    eager_graphs(runner, options)
    before = EagerStep.captured
    assert run_of(context, entries, states) == expected
    assert EagerStep.captured == before + 2
    [logits] = context.eval([Entry(0, [7], context.kv.length(0))])  # through the same graph
    assert EagerStep.captured == before + 2
    [expected_logits] = plain_context.eval([Entry(0, [7], plain_context.kv.length(0))])
    torch.testing.assert_close(torch.as_tensor(logits), torch.as_tensor(expected_logits))


def test_launched_steps_go_on_without_a_row_that_leaves(tiny_model: Any, eager_graphs: Any, plain: Any) -> None:
    """The second row becomes the first one, and its input is what the second row has drawn."""
    model, (expected, _) = tiny_model("llama"), plain("lean", "llama")
    runner = TritonRunner(model)
    context, entries, states = begun(model, runner)
    eager_graphs(runner, GraphOptions(max_batch_size=4))
    run = context.decode_run(entries, states, max_steps=STEPS, num_draws=[1, STEPS])
    drawn = [[draw.token_id for draw in run.step() if isinstance(draw, Sampled)] for _ in range(STEPS)]
    run.close()
    assert drawn == expected[:1] + [tokens[1:] for tokens in expected[1:]]
    assert context.kv.length(0) == 0
    context.kv.check_integrity()


def test_rows_that_depend_on_the_output_are_drawn_again_as_single_steps_draw_them(
    tiny_model: Any, eager_graphs: Any
) -> None:
    params = [SamplingParams(seed=1, repetition_penalty=3.0), SamplingParams(seed=2, temperature=1.2, logprobs=2)]

    def begin(graphed: bool) -> tuple[Context, list[Entry], list[SamplerState]]:
        runner = TritonRunner(tiny_model("llama"))
        context, entries, _ = begun(tiny_model("llama"), runner)
        if graphed:
            eager_graphs(runner, GraphOptions(q_padding_interval_size=4, max_batch_size=4))
        return context, entries, [SamplerState(*one) for one in zip(params, PROMPTS, strict=True)]

    def accept(states: list[SamplerState], drawn: list[Any]) -> None:
        for state, draw in zip(states, drawn, strict=True):
            state.accept(draw.token_id)

    context, entries, states = begin(graphed=False)
    expected = []
    for _ in range(STEPS):
        expected.append(context.step(entries, states, with_logits=False)[1])
        accept(states, expected[-1])
        entries = [
            Entry(e.seq_id, [draw.token_id], e.n_past + 1) for e, draw in zip(entries, expected[-1], strict=True)
        ]
    context, entries, states = begin(graphed=True)
    run = context.decode_run(entries, states, max_steps=STEPS)
    for step in range(STEPS):
        drawn = run.step()
        accept(states, drawn)
        assert [draw.token_id for draw in drawn] == [draw.token_id for draw in expected[step]]
        assert drawn[1].logprob == pytest.approx(expected[step][1].logprob, abs=1e-4)
        assert [token for token, _ in drawn[1].top] == [token for token, _ in expected[step][1].top]
    run.close()


def test_the_faster_products_are_captured_and_timed_once_for_a_number_of_rows(
    tiny_model: Any, eager_graphs: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (expected, _) = tiny_model("llama"), plain("lean", "llama")
    runner = TritonRunner(model)
    context, entries, states = begun(model, runner)
    options = GraphOptions(q_padding_interval_size=4, kv_padding_interval_size=8, max_batch_size=4)
    eager_graphs(runner, options)
    cpu, limits, lean = torch.device("cpu"), runner._limits, runner._lean
    assert limits is not None and lean is not None
    graphs = DecodeGraphs(options, runner._decode, runner._drawn, a_place(runner, limits), lean.products)
    runner._launches = Launches(cpu, runner._drawn, runner._upload, runner._decode, graphs)
    monkeypatch.setattr(EagerStep, "times", {"own": 2.0, "library": 1.0})
    taken: list[str | None] = []
    takes_own = lean._takes_own

    def noted(step: LeanStep) -> bool:
        taken.append(step.products)
        return takes_own(step)

    monkeypatch.setattr(lean, "_takes_own", noted)
    before = EagerStep.captured
    assert run_of(context, entries, states) == expected
    assert EagerStep.captured == before + 3  # two for the first length, and for the next length the faster one only
    assert taken[:2] == ["own", "library"]
    assert {*taken[2:]} == {"library"}


def decodes(token: int, position: int = 2) -> RaggedBatch:
    """One sequence that decodes `position` in block 1."""
    return RaggedBatch(
        input_ids=np.array([token]),
        positions=np.array([position]),
        query_starts=np.array([0, 1], np.int32),
        kv_lens=np.array([position + 1], np.int32),
        slots=(np.array([BLOCK_SIZE + position]),),
        block_tables=(np.array([[1]], np.int32),),
        logit_rows=np.array([0]),
        max_query_len=1,
        max_kv_len=position + 1,
    )


GREEDY = np.zeros((1, 5))


def allocated(model: Any) -> TritonRunner:
    runner = TritonRunner(model)
    runner.allocate([4], BLOCK_SIZE)
    return runner


def test_a_batch_may_be_changed_as_soon_as_its_step_was_launched(tiny_model: Any) -> None:
    runner = allocated(tiny_model("llama"))
    expected = runner.launch(decodes(9), GREEDY, None).wait()
    batch, draws = decodes(9), GREEDY.copy()
    launched = runner.launch(batch, draws, None)
    batch.input_ids.fill(3)
    batch.slots[0].fill(0)
    draws.fill(7.0)
    assert launched.wait() == expected


def test_a_row_that_cannot_be_drawn_from_feeds_token_0_to_the_next_step(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    zero = allocated(model)
    zero.launch(decodes(5, 1), GREEDY, None).wait()
    zero.launch(decodes(0), GREEDY, None).wait()
    runner = allocated(model)
    assert runner._lean is not None
    forward = runner._lean.forward
    monkeypatch.setattr(runner._lean, "forward", lambda step: forward(step).fill_(float("nan")))
    first = runner.launch(decodes(5, 1), GREEDY, None)
    monkeypatch.setattr(runner._lean, "forward", forward)
    second = runner.launch(decodes(123), GREEDY, first)
    assert first.wait() == [None]
    second.wait()
    assert runner.read_blocks(0, [1]).equal(zero.read_blocks(0, [1]))


def test_an_index_out_of_range_is_refused_before_anything_is_launched(tiny_model: Any) -> None:
    runner = allocated(tiny_model("llama"))
    with pytest.raises(BatchError, match="token id"):
        runner.launch(decodes(320), GREEDY, None)
    assert runner.read_blocks(0, range(4)).eq(0).all()


def test_no_more_than_two_steps_are_under_way(tiny_model: Any) -> None:
    runner = allocated(tiny_model("llama"))
    first = runner.launch(decodes(5), GREEDY, None)
    second = runner.launch(decodes(5, 3), GREEDY, first)
    with pytest.raises(AssertionError, match="two launched steps"):
        runner.launch(decodes(5), GREEDY, second)
    first.wait()
    with pytest.raises(AssertionError, match="latest step"):
        runner.launch(decodes(5), GREEDY, first)
    second.wait()
    with pytest.raises(AssertionError, match="a later step may have"):
        second.wait()


def test_a_launch_that_failed_leaves_its_buffers_to_the_next(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = allocated(tiny_model("llama"))
    expected = runner.launch(decodes(9), GREEDY, None).wait()
    assert runner._lean is not None
    forward = runner._lean.forward

    def fail(step: LeanStep) -> torch.Tensor:
        raise MemoryError

    for _ in range(3):
        monkeypatch.setattr(runner._lean, "forward", fail)
        with pytest.raises(MemoryError):
            runner.launch(decodes(9), GREEDY, None)
        monkeypatch.setattr(runner._lean, "forward", forward)
        assert runner.launch(decodes(9), GREEDY, None).wait() == expected


def test_asking_that_nothing_waits_for_the_device_is_no_error_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with without_waiting():
            assert modes == ["error"]
            modes.append("within")
            warnings.simplefilter("ignore")
    assert modes == ["error", "within", "default"]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_h14_padded_steps_with_prompts_give_the_logits_of_eager_steps(
    family: str, tiny_model: Any, eager_graphs: Any
) -> None:
    """Chunks beside decodes, of every number of tokens up to the largest captured, and beyond."""
    model = tiny_model(family)
    logits: list[list[Rows]] = []
    before = EagerStep.captured
    for captures in (False, True):
        runner = TritonRunner(model)
        context = Context(model, runner, n_ctx=192, n_parallel=4, block_size=BLOCK_SIZE)
        if captures:
            eager_graphs(runner, GraphOptions(max_batch_size=4, max_prompt_tokens=12))
        found = [context.prefill([7, 9, 11], 0, 0)]
        for step, length in enumerate((2, 8, 11, 12, 13)):
            entries = [Entry(0, (5 + step,), 3 + step), Entry(1 + step % 3, tuple(range(3, 3 + length)), 0)]
            found += [part for part in context.eval(entries) if part is not None]
            context.seq_rm(1 + step % 3)
        logits.append(found)
        context.kv.check_integrity()
    assert EagerStep.captured == before + 1
    for expected, actual in zip(*logits, strict=True):
        torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [6, 12, 13])
def test_h14_captured_steps_give_logits_of_drafted_tokens(length: int, tiny_model: Any, eager_graphs: Any) -> None:
    """With a row for each token, in the largest captured size and beyond."""
    model = tiny_model("llama")
    found = []
    for captures in (False, True):
        runner = TritonRunner(model)
        context = Context(model, runner, n_ctx=96, n_parallel=2, block_size=BLOCK_SIZE)
        if captures:
            eager_graphs(runner, GraphOptions(max_batch_size=2, max_prompt_tokens=12))
        found.append(context.eval([Entry(0, tuple(range(3, 3 + length)), 0, Logits.ALL)])[0])
    expected, actual = found
    assert expected is not None and actual is not None and len(actual) == length
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), rtol=1e-5, atol=1e-5)
