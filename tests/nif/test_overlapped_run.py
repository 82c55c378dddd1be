"""OverlappedRun against single steps: the same tokens and KV, launched one step earlier, and nothing left behind."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from genbatch.nif.context import Context
from genbatch.nif.context.overlapped_run import OverlappedRun
from genbatch.nif.errors import DeviceFault, OutOfBlocks
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import Entry
from genbatch.nif.sampling.sampler import Floats, Sampled, SampleFault, SamplerState, SamplingParams
from tests.nif.launching_runner import LaunchingTorchRunner

TinyModel = Callable[[str], Model]

GREEDY = [SamplingParams(seed=seed) for seed in range(4)]
MIXED = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.9, top_p=0.8),
    SamplingParams(seed=3, temperature=1.5),
    SamplingParams(seed=4, temperature=2.0, top_k=20, min_p=0.02),
]
STEPS = 19
BLOCK_SIZE = 4


def begin(model: Model, params: Sequence[SamplingParams], **options: object) -> tuple[Context, LaunchingTorchRunner]:
    """A context with a prompt evaluated for each sequence but for its last token."""
    runner = LaunchingTorchRunner(model)
    sizes = {"n_ctx": 512, "n_parallel": len(params) + 1, "block_size": BLOCK_SIZE, **options}
    context = Context(model, runner, **sizes)  # type: ignore[arg-type]
    for seq_id in range(len(params)):
        context.attach_prefix(seq_id, prompt_of(seq_id))
        context.prefill(prompt_of(seq_id)[:-1], seq_id, 0)
    return context, runner


def prompt_of(seq_id: int) -> list[int]:
    generator = torch.Generator().manual_seed(seq_id)
    tokens: list[int] = torch.randint(3, 320, (5 + 6 * seq_id,), generator=generator).tolist()
    return tokens


def first_entries(params: Sequence[SamplingParams]) -> list[Entry]:
    prompts = map(prompt_of, range(len(params)))
    return [Entry(seq_id, prompt[-1:], len(prompt) - 1) for seq_id, prompt in enumerate(prompts)]


def states_of(params: Sequence[SamplingParams]) -> list[SamplerState]:
    return [SamplerState(settings, prompt_of(seq_id)) for seq_id, settings in enumerate(params)]


def start(context: Context, params: Sequence[SamplingParams], max_steps: int = STEPS) -> OverlappedRun:
    run = context.decode_run(first_entries(params), states_of(params), max_steps=max_steps)
    assert isinstance(run, OverlappedRun)
    return run


def ids(drawn: Sequence[Sampled | SampleFault | None]) -> list[int]:
    assert all(isinstance(draw, Sampled) for draw in drawn)
    return [draw.token_id for draw in drawn if isinstance(draw, Sampled)]


def single_steps(
    context: Context, params: Sequence[SamplingParams], steps: int, begun: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """What steps that wait for one another draw, after `begun`."""
    states, drawn = states_of(params), [list(tokens) for tokens in begun]
    for _ in range(steps):
        entries = first_entries(params)
        if drawn:
            entries = [
                Entry(entry.seq_id, [token], entry.n_past + len(drawn))
                for entry, token in zip(entries, drawn[-1], strict=True)
            ]
        drawn.append(ids(context.step(entries, states, with_logits=False)[1]))
    return drawn


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
def test_h15_a_run_whose_steps_overlap_draws_what_single_steps_draw(
    tiny_model: TinyModel, family: str, params: list[SamplingParams]
) -> None:
    """With a window, with none and with both; blocks that fall behind it go to others while steps are under way."""
    model = tiny_model(family)
    expected = single_steps(begin(model, params)[0], params, STEPS)
    context, _ = begin(model, params)
    run = start(context, params)
    drawn = []
    for step in range(STEPS):
        drawn.append(ids(run.step()))
        assert run.is_ahead == (step < STEPS - 1)
        context.kv.check_integrity()
    run.close()
    assert drawn == expected
    for seq_id, entry in enumerate(first_entries(params)):
        generated = [tokens[seq_id] for tokens in drawn]
        assert context.kv.tokens(seq_id).tolist() == prompt_of(seq_id) + generated[:-1]
        assert context.kv.length(seq_id) == entry.n_past + STEPS
    context.kv.check_integrity()


def test_h15_a_step_begins_before_the_tokens_of_the_one_before_are_read(tiny_model: TinyModel) -> None:
    context, runner = begin(tiny_model("llama"), GREEDY)
    run = start(context, GREEDY, max_steps=4)
    for _ in range(4):
        run.step()
    run.close()
    order = [("launch", 1)]
    for step in (1, 2, 3):
        order += [("launch", step + 1), ("wait", step)]
    assert runner.trace == [*order, ("wait", 4)]


def test_a_step_that_may_be_the_last_has_none_begin_behind_it(tiny_model: TinyModel) -> None:
    context, runner = begin(tiny_model("llama"), GREEDY)
    expected = single_steps(context, GREEDY, 4)
    context, runner = begin(tiny_model("llama"), GREEDY)
    run = start(context, GREEDY)
    drawn = [ids(run.step()), ids(run.step()), ids(run.step(ahead=False))]
    assert not run.is_ahead
    assert runner.launches == 3
    drawn.append(ids(run.step()))  # and may go on after it
    run.close()
    assert drawn == expected


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_run_that_is_closed_undoes_the_step_under_way(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    expected = single_steps(begin(model, MIXED)[0], MIXED, STEPS)
    for steps in range(1, 9):  # some of them at the edge of a block
        context, runner = begin(model, MIXED)
        run = start(context, MIXED)
        drawn = [ids(run.step()) for _ in range(steps)]
        assert run.is_ahead
        run.close()
        assert runner.trace[-1] == ("wait", steps + 1)
        assert [context.kv.length(seq_id) for seq_id in range(4)] == [
            entry.n_past + steps for entry in first_entries(MIXED)
        ]
        context.kv.check_integrity()
        assert single_steps(context, MIXED, STEPS - steps, drawn) == expected
        for seq_id in range(4):
            context.seq_rm(seq_id)
        assert context.kv.counts().used == 0


def test_a_row_that_is_not_finite_faults_alone_and_the_others_go_on(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    expected = single_steps(begin(model, MIXED)[0], MIXED, 8)
    context, runner = begin(model, MIXED)

    def spoil(launch: int, logits: Floats) -> None:
        if launch == 4:
            logits[2, 7] = float("nan")

    runner.spoil = spoil
    run = start(context, MIXED)
    drawn = [ids(run.step()) for _ in range(3)]
    faulty = run.step()
    run.close()
    assert [isinstance(draw, SampleFault) for draw in faulty] == [False, False, True, False]
    assert [draw.token_id for draw in faulty if isinstance(draw, Sampled)] == [expected[3][row] for row in (0, 1, 3)]
    context.seq_rm(2)
    context.kv.check_integrity()
    for seq_id in (0, 1, 3):
        rest = [tokens[seq_id] for tokens in expected]
        entry, state = first_entries(MIXED)[seq_id], states_of(MIXED)[seq_id]
        again = [
            ids(context.step([Entry(seq_id, [rest[step - 1]], entry.n_past + step)], [state], with_logits=False)[1])[0]
            for step in range(4, 8)
        ]
        assert again == rest[4:8]
    assert drawn == expected[:3]


def test_a_run_that_finds_no_block_for_the_step_ahead_gives_its_tokens_first(tiny_model: TinyModel) -> None:
    context, runner = begin(tiny_model("llama"), GREEDY[:2], num_blocks=[6], n_parallel=2)
    # 4 and 10 positions are held, in 1 and 3 blocks; 5 and 11 come next. The sixth block is the last.
    run = start(context, GREEDY[:2])
    steps = 0
    with pytest.raises(OutOfBlocks):
        while True:
            run.step()
            steps += 1
    assert runner.launches == steps == len([event for event in runner.trace if event[0] == "wait"])
    assert [context.kv.length(seq_id) for seq_id in range(2)] == [4 + steps, 10 + steps]
    run.close()
    context.kv.check_integrity()
    assert context.kv.counts().free == 0


def test_what_a_run_generated_is_found_again_by_content(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    context, _ = begin(model, MIXED)
    run = start(context, MIXED)
    drawn = [ids(run.step()) for _ in range(STEPS - 2)]
    run.close()  # with a step under way
    text = prompt_of(2) + [tokens[2] for tokens in drawn]
    held = context.kv.length(2)
    for seq_id in range(4):
        context.seq_rm(seq_id)
    assert context.attach_prefix(4, [*text, 9]) == held // BLOCK_SIZE * BLOCK_SIZE
    reused = context.prefill([*text, 9][context.kv.length(4) :], 4, context.kv.length(4))
    fresh, _ = begin(model, [])
    torch.testing.assert_close(*map(torch.as_tensor, (reused, fresh.prefill([*text, 9], 0, 0))), rtol=1e-4, atol=1e-4)
    context.kv.check_integrity()


def test_a_shared_last_block_is_copied_before_a_run_writes_to_it(tiny_model: TinyModel) -> None:
    model, params = tiny_model("llama"), GREEDY[:2]
    expected = single_steps(begin(model, params)[0], params, 6)
    context, _ = begin(model, params)
    length = context.kv.length(1)
    assert length % BLOCK_SIZE
    context.seq_cp(1, 2)
    entries = [*first_entries(params), Entry(2, [7], length)]
    run = context.decode_run(entries, [*states_of(params), SamplerState(params[1], ())], max_steps=6)
    drawn = [ids(run.step()) for _ in range(6)]
    run.close()
    assert [tokens[:2] for tokens in drawn] == expected
    context.kv.check_integrity()


DEPENDENT = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5, "temperature": 0.9},
    {"logit_bias": {5: 30.0}},
    {"logprobs": 2},
    {"min_tokens": 3, "suppress": frozenset(range(200))},
]


@pytest.mark.parametrize("settings", DEPENDENT, ids=lambda settings: next(iter(settings)))
def test_a_row_that_depends_on_the_output_takes_no_overlap_from_the_batch(
    tiny_model: TinyModel, settings: dict[str, object]
) -> None:
    params = [SamplingParams(seed=0), SamplingParams(seed=0, **settings), GREEDY[2]]  # type: ignore[arg-type]
    context, _ = begin(tiny_model("llama"), params)
    entries, states, expected = first_entries(params), states_of(params), []
    for _ in range(6):
        expected.append(context.step(entries, states, with_logits=False)[1])
        for state, token in zip(states, ids(expected[-1]), strict=True):
            state.accept(token)
        entries = [
            Entry(entry.seq_id, [token], entry.n_past + 1)
            for entry, token in zip(entries, ids(expected[-1]), strict=True)
        ]
    assert expected != single_steps(begin(tiny_model("llama"), GREEDY[:3])[0], GREEDY[:3], 6)
    context, runner = begin(tiny_model("llama"), params)
    states = states_of(params)
    run = context.decode_run(first_entries(params), states, max_steps=6)
    assert isinstance(run, OverlappedRun)
    for step in range(6):
        drawn = run.step()
        assert drawn == expected[step]
        assert run.is_ahead == (step < 5)
        for state, token in zip(states, ids(drawn), strict=True):
            state.accept(token)
    run.close()
    assert runner.trace[:4] == [("launch", 1), ("launch", 2), ("wait", 1), ("launch", 3)]
    context.kv.check_integrity()


class Broken:
    """A constraint that fails to make its mask. Implements `Constraint`."""

    fault = None
    is_slow = False

    def accept(self, token_id: int) -> None:
        """Nothing to keep."""

    def prepare(self) -> None:
        raise RuntimeError("no mask")


def test_a_sampler_that_raises_beside_others_fails_its_own_row_of_an_overlapped_run(tiny_model: TinyModel) -> None:
    params = [SamplingParams(seed=0), SamplingParams(seed=0), SamplingParams(seed=0, logprobs=1)]
    context, _ = begin(tiny_model("llama"), params)
    states = states_of(params)
    broken: Any = Broken()
    states[1] = SamplerState(params[1], (), broken)
    run = context.decode_run(first_entries(params), states, max_steps=3)
    drawn = run.step()
    run.close()
    assert [draw.failed for draw in drawn] == [False, True, False]
    assert isinstance(drawn[1], SampleFault) and "no mask" in drawn[1].reason
    assert isinstance(drawn[2], Sampled) and drawn[2].logprob is not None


def test_a_device_that_fails_is_not_taken_for_a_step_that_left_no_trace(tiny_model: TinyModel) -> None:
    context, runner = begin(tiny_model("llama"), GREEDY)

    def gate(launch: int) -> None:
        if launch >= 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner.gate = gate
    run = start(context, GREEDY)
    run.step()
    run.step()
    with pytest.raises(DeviceFault, match="illegal memory access"):
        run.step()
    with pytest.raises(DeviceFault):
        run.close()
    run.close()
    context.kv.check_integrity()


def test_a_launch_that_fails_is_undone_and_told_after_the_tokens_before_it(tiny_model: TinyModel) -> None:
    context, runner = begin(tiny_model("llama"), GREEDY)

    def spoil(launch: int, logits: Floats) -> None:
        if launch == 3:
            raise MemoryError

    runner.spoil = spoil
    run = start(context, GREEDY)
    run.step()
    run.step()
    with pytest.raises(MemoryError):
        run.step()
    run.close()
    assert [context.kv.length(seq_id) for seq_id in range(4)] == [entry.n_past + 2 for entry in first_entries(GREEDY)]
    context.kv.check_integrity()


def test_a_first_launch_that_fails_leaves_no_trace(tiny_model: TinyModel) -> None:
    context, runner = begin(tiny_model("llama"), GREEDY)

    def spoil(launch: int, logits: Floats) -> None:
        raise ValueError

    runner.spoil = spoil
    used = context.kv.counts().used
    run = start(context, GREEDY)
    with pytest.raises(ValueError):
        run.step()
    run.close()
    assert context.kv.counts().used == used
    context.kv.check_integrity()


# Of four sequences: the tokens that each may draw, and the steps before which the caller takes one out.
DRAWS = [STEPS, 1, 12, STEPS]
TAKEN_OUT = {7: 0}
LASTS = [8, 1, 12, STEPS]  # so many draws each has: the one that is taken out is in the step that is under way


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
def test_a_run_goes_on_without_the_sequences_that_leave_it(
    tiny_model: TinyModel, family: str, params: list[SamplingParams]
) -> None:
    model = tiny_model(family)
    expected = single_steps(begin(model, params)[0], params, STEPS)
    context, runner = begin(model, params)
    run = context.decode_run(first_entries(params), states_of(params), max_steps=STEPS, num_draws=DRAWS)
    assert isinstance(run, OverlappedRun)
    drawn: list[list[int]] = [[], [], [], []]
    freed: dict[int, int] = {}
    for step in range(STEPS):
        if step in TAKEN_OUT:
            run.rows.leave(TAKEN_OUT[step])
        for tokens, draw in zip(drawn, run.step(), strict=True):
            if draw is not None:
                tokens += ids([draw])
        freed |= dict.fromkeys(run.rows.take_freed(), step)
        context.kv.check_integrity()
        lengths = [context.kv.length(seq_id) for seq_id in range(4)]
        assert [length == 0 for length in lengths] == [seq_id in freed for seq_id in range(4)]
    assert run.is_over
    run.close()
    assert drawn == [[tokens[seq_id] for tokens in expected[: LASTS[seq_id]]] for seq_id in range(4)]
    # A sequence is freed in the step that reads its last row: the next step, which is under way, has none of it.
    assert freed == {1: 0, 0: 7, 2: 11}
    assert runner.launches == STEPS


def test_the_blocks_of_a_sequence_that_leaves_are_kept_while_a_step_under_way_writes_to_them(
    tiny_model: TinyModel,
) -> None:
    context, _ = begin(tiny_model("llama"), GREEDY)
    run = start(context, GREEDY)
    run.step()
    run.rows.leave(3)
    with pytest.raises(AssertionError, match="that writes to 3"):
        context.seq_rm(3)
    used = context.kv.counts().used
    run.step()  # reads the step that was under way; the one under way now has no row of the sequence
    assert run.rows.take_freed() == [3]
    assert context.kv.counts().used < used
    run.close()
    context.kv.check_integrity()


def test_a_row_that_depends_on_the_output_keeps_its_sampler_when_a_row_before_it_leaves(tiny_model: TinyModel) -> None:
    params = [
        SamplingParams(seed=0),
        SamplingParams(seed=0, repetition_penalty=1.8),
        SamplingParams(seed=3, logprobs=1),
    ]
    drawn: list[list[list[Sampled]]] = []
    for num_draws in ([8, 8, 8], [2, 8, 8]):
        context, _ = begin(tiny_model("llama"), params)
        states = states_of(params)
        run = context.decode_run(first_entries(params), states, max_steps=8, num_draws=num_draws)
        drawn.append([])
        for _ in range(8):
            step = [draw for draw in run.step()[1:] if isinstance(draw, Sampled)]
            for state, draw in zip(states[1:], step, strict=True):
                state.accept(draw.token_id)
            drawn[-1].append(step)
        run.close()
    assert drawn[0] == drawn[1]
    assert drawn[0][5][1].logprob is not None


def test_a_run_whose_sequences_have_all_left_is_over(tiny_model: TinyModel) -> None:
    context, runner = begin(tiny_model("llama"), GREEDY)
    run = context.decode_run(first_entries(GREEDY), states_of(GREEDY), max_steps=STEPS, num_draws=[3, 2, 3, 1])
    for _ in range(3):
        assert not run.is_over
        run.step()
    assert run.is_over and runner.launches == 3
    assert run.rows.take_freed() == [3, 1, 0, 2]
    run.close()
    assert context.kv.counts().used == 0
