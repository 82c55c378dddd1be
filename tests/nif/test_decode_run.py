"""DecodeRun against single steps: the same tokens, the same KV, and nothing left behind by a step that failed."""

from collections.abc import Callable, Sequence

import pytest
import torch

from genbatch.nif.batch import Entry
from genbatch.nif.context import Context
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.models.model import Model
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState
from genbatch.nif.sampling.sampling_params import SamplingParams

TinyModel = Callable[[str], Model]

PARAMS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.9, top_p=0.8),
    SamplingParams(seed=3, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(seed=4, min_tokens=5, suppress=frozenset(range(0, 300, 3)), logprobs=2),
]
STEPS = 21


def begin(context: Context, params: list[SamplingParams]) -> tuple[list[Entry], list[SamplerState]]:
    """Evaluates a prompt for each sequence; its last token is the first to be decoded."""
    entries, states = [], []
    for seq_id, settings in enumerate(params):
        generator = torch.Generator().manual_seed(seq_id)
        prompt = torch.randint(3, 320, (5 + 6 * seq_id,), generator=generator).tolist()
        context.prefill(prompt[:-1], seq_id, 0)
        entries.append(Entry(seq_id, prompt[-1:], len(prompt) - 1))
        states.append(SamplerState(settings, prompt))
    return entries, states


def accepted(states: list[SamplerState], drawn: Sequence[Sampled | SampleFault | None]) -> list[Sampled]:
    sampled = [draw for draw in drawn if isinstance(draw, Sampled)]
    for state, draw in zip(states, sampled, strict=True):
        state.accept(draw.token_id)
    return sampled


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("params", [PARAMS[:1] * 4, PARAMS])
def test_a_run_draws_what_single_steps_draw(tiny_model: TinyModel, family: str, params: list[SamplingParams]) -> None:
    model = tiny_model(family)
    drawn: dict[bool, list[list[Sampled]]] = {True: [], False: []}
    for in_a_run in (True, False):
        context = Context(model, TorchRunner(model), n_ctx=512, n_parallel=4, block_size=4)
        entries, states = begin(context, params)
        run = context.decode_run(entries, states, max_steps=STEPS)
        for _ in range(STEPS):
            step = run.step() if in_a_run else context.step(entries, states)[1]
            drawn[in_a_run].append(accepted(states, step))
            entries = [
                Entry(entry.seq_id, [draw.token_id], entry.n_past + 1)
                for entry, draw in zip(entries, drawn[in_a_run][-1], strict=True)
            ]
        assert [context.kv.length(seq_id) for seq_id in range(4)] == [entry.n_past for entry in entries]
        context.kv.check_integrity()
        context.close()
    assert drawn[True] == drawn[False]


def test_a_shared_last_block_is_copied_before_a_run_writes_to_it(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    texts = []
    for shares in (True, False):
        context = Context(model, TorchRunner(model), n_ctx=256, n_parallel=2, block_size=8)
        prompt = torch.randint(3, 320, (13,), generator=torch.Generator().manual_seed(9)).tolist()
        context.prefill(prompt, 0, 0)
        if shares:
            context.seq_cp(0, 1)
        else:
            context.prefill(prompt, 1, 0)
        entries = [Entry(0, [7], 13), Entry(1, [8], 13)]
        states = [SamplerState(PARAMS[0], ()), SamplerState(PARAMS[0], ())]
        run = context.decode_run(entries, states, max_steps=6)
        texts.append([accepted(states, run.step()) for _ in range(6)])
    assert texts[0] == texts[1]


def test_a_run_that_finds_no_block_leaves_its_last_step_whole(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    context = Context(model, TorchRunner(model), num_blocks=[4], n_parallel=2, block_size=4)
    context.prefill([5, 6, 7], 0, 0)
    context.prefill([8, 9, 10], 1, 0)
    states = [SamplerState(PARAMS[0], ()), SamplerState(PARAMS[0], ())]
    run = context.decode_run([Entry(0, [11], 3), Entry(1, [12], 3)], states, max_steps=20)
    for _ in range(5):
        run.step()
    with pytest.raises(OutOfBlocks):
        run.step()
    assert [context.kv.length(seq_id) for seq_id in range(2)] == [8, 8]
    context.kv.check_integrity()
