"""A context over the C kernels draws the same tokens however little of the logits it asks for."""

from collections.abc import Callable

import torch

from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.native.runner import native_runner
from genbatch.nif.runner import Entry
from genbatch.nif.sampling.sampler import Sampled, SamplerState, SamplingParams

Models = Callable[..., Model]

PARAMS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2),
    SamplingParams(seed=3, temperature=0.9, top_p=0.8),
    SamplingParams(seed=4, repetition_penalty=1.3, logprobs=2),
]
STEPS = 20


def decode(model: Model, params: list[SamplingParams], way: str) -> list[list[Sampled]]:
    context = Context(model, native_runner(model, n_threads=2), n_ctx=512, n_parallel=4, block_size=16)
    entries, states = [], []
    for seq_id, settings in enumerate(params):
        generator = torch.Generator().manual_seed(seq_id)
        prompt = torch.randint(3, 320, (5 + 6 * seq_id,), generator=generator).tolist()
        context.prefill(prompt[:-1], seq_id, 0)
        entries.append(Entry(seq_id, prompt[-1:], len(prompt) - 1))
        states.append(SamplerState(settings, prompt))
    run = context.decode_run(entries, states, max_steps=STEPS)
    steps = []
    for _ in range(STEPS):
        drawn = run.step() if way == "run" else context.step(entries, states, with_logits=way == "logits")[1]
        sampled = [draw for draw in drawn if isinstance(draw, Sampled)]
        for state, draw in zip(states, sampled, strict=True):
            state.accept(draw.token_id)
        entries = [Entry(e.seq_id, [d.token_id], e.n_past + 1) for e, d in zip(entries, sampled, strict=True)]
        steps.append(sampled)
    context.close()
    return steps


def test_greedy_draws_are_the_same_with_the_logits_without_them_and_in_a_run(native_model: Models) -> None:
    model = native_model("llama")
    want = decode(model, PARAMS[:2], "logits")
    assert decode(model, PARAMS[:2], "draws") == want
    assert decode(model, PARAMS[:2], "run") == want


def test_mixed_draws_are_the_same_with_the_logits_without_them_and_in_a_run(native_model: Models) -> None:
    model = native_model("llama")
    want = decode(model, PARAMS, "logits")
    assert decode(model, PARAMS, "draws") == want
    assert decode(model, PARAMS, "run") == want
    assert [step[0] for step in want] == [step[0] for step in decode(model, PARAMS[:2], "draws")]
