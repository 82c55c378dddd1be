"""The offline engine: ragged batches equal solo runs, whoever joins when."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from genbatch.clients.offline import InferenceEngine, OfflineScheduler, generate_batch
from genbatch.nif.errors import BatchError
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.errors import InvalidRequest, PromptTooLong

TinyModel = Callable[[str], Model]
OracleOf = Callable[[str], Any]


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (length,), generator=generator).tolist()


def test_r01_a_step_over_ragged_sessions_equals_solo_runs(tiny_model: TinyModel, oracle: OracleOf) -> None:
    scheduler = OfflineScheduler(tiny_model("llama"), n_ctx=512)
    prompts = [prompt_of(length, length) for length in (3, 31, 12)]
    ids = [scheduler.add_request(prompt, max_new_tokens=9, stop_on_eos=False) for prompt in prompts]
    scheduler.step()
    logits = scheduler.engine.decode_step_sessions([scheduler.session(i) for i in ids])
    assert logits.shape == (3, tiny_model("llama").vocab_size)
    for request_id, row in zip(ids, logits, strict=True):
        expected = oracle("llama").log_probs(scheduler.session(request_id).tokens)[-1]
        torch.testing.assert_close(torch.log_softmax(row, -1), expected, atol=1e-4, rtol=0)


def test_r01_a_finished_session_is_refused(tiny_model: TinyModel) -> None:
    scheduler = OfflineScheduler(tiny_model("llama"), n_ctx=256)
    request_id = scheduler.add_request([5, 6], max_new_tokens=1)
    scheduler.run()
    with pytest.raises(BatchError, match="finished"):
        scheduler.engine.decode_step_sessions([scheduler.session(request_id)])


def test_r02_each_stop_condition_ends_a_session_and_a_finished_one_returns_none(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    scheduler = OfflineScheduler(model, n_ctx=64)
    limited = scheduler.session(scheduler.add_request([5, 6], max_new_tokens=3, stop_on_eos=False))
    unlimited = scheduler.session(scheduler.add_request([5, 6], stop_on_eos=False))
    until_eos = scheduler.session(scheduler.add_request([5, 6], max_new_tokens=50))
    [eos] = model.eos_token_ids
    rigged = torch.zeros(model.vocab_size)
    rigged[eos] = 50.0
    assert until_eos.apply_batch_logits(rigged) == eos
    assert until_eos.finished
    assert until_eos.apply_batch_logits(rigged) is None
    assert until_eos.generated_ids == [eos]
    assert until_eos.decode_text() == ""
    while not unlimited.finished:
        unlimited.apply_batch_logits(torch.zeros(model.vocab_size))
    assert len(unlimited.tokens) == 65  # the token drawn last takes no position
    for _ in range(3):
        assert not limited.finished
        limited.apply_batch_logits(rigged)
    assert limited.finished


def test_r02_drawing_follows_temperature_top_k_and_top_p(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    logits = torch.full((model.vocab_size,), -5.0)
    logits[10], logits[11] = 2.0, 1.9
    scheduler = OfflineScheduler(model, n_ctx=64)

    def tokens(**params: Any) -> set[int]:
        sessions = [scheduler.session(scheduler.add_request([5], seed=seed, **params)) for seed in range(60)]
        return {session.apply_batch_logits(logits) or 0 for session in sessions}

    assert tokens(do_sample=False, temperature=9.0) == {10}
    assert tokens(do_sample=True, top_k=1) == {10}
    assert tokens(do_sample=True, top_k=2) == {10, 11}
    assert tokens(do_sample=True, top_p=0.3) == {10}
    assert len(tokens(do_sample=True, temperature=20.0)) > 20


def test_r03_a_pool_has_room_for_as_much_as_it_holds(tiny_model: TinyModel) -> None:
    engine = InferenceEngine(tiny_model("llama"), n_ctx=64)
    blocks = engine.context.kv.counts().max
    positions = blocks * engine.context.kv.block_size
    assert engine.has_room(positions, spare=0) and not engine.has_room(positions, spare=1)
    assert engine.has_room(positions - engine.context.kv.block_size, spare=1)
    engine.close()


def test_r03_an_empty_step_returns_nothing_and_blocks_are_released(tiny_model: TinyModel) -> None:
    scheduler = OfflineScheduler(tiny_model("llama"), n_ctx=256)
    assert scheduler.step() == {}
    assert not scheduler.has_unfinished()
    ids = [scheduler.add_request(f"prompt {i}", max_new_tokens=4) for i in range(3)]
    assert scheduler.has_unfinished()
    assert set(scheduler.step()) == set(ids)
    texts = scheduler.run()
    assert set(texts) == set(ids)
    assert scheduler.engine.context.kv.counts().used == 0
    scheduler.engine.context.kv.check_integrity()


def test_r03_more_requests_than_slots_and_a_small_pool_give_the_same_tokens(
    tiny_model: TinyModel, oracle: OracleOf
) -> None:
    scheduler = OfflineScheduler(tiny_model("llama"), n_ctx=96, n_parallel=3)
    prompts = [prompt_of(9 + i, i) for i in range(7)]
    ids = [scheduler.add_request(prompt, max_new_tokens=30, stop_on_eos=False) for prompt in prompts]
    scheduler.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        expected = oracle("llama").generate(prompt, 30)
        assert scheduler.session(request_id).generated_ids[: len(expected)] == expected


def test_r04_autocast_agrees_within_its_precision(tiny_model: TinyModel) -> None:
    model, prompt = tiny_model("llama"), prompt_of(12, 1)
    rows = []
    for options in ({}, {"use_amp": True, "amp_dtype": torch.bfloat16}):
        scheduler = OfflineScheduler(InferenceEngine(model, n_ctx=64, **options))
        session = scheduler.session(scheduler.add_request(prompt))
        scheduler.engine.prefill(session)
        rows.append(torch.softmax(scheduler.engine.decode_step_sessions([session])[0], -1))
    assert not torch.equal(rows[0], rows[1])
    torch.testing.assert_close(rows[0], rows[1], atol=0.05, rtol=0)


def test_r05_a_request_that_joins_in_mid_decode_changes_nobody(tiny_model: TinyModel, oracle: OracleOf) -> None:
    scheduler = OfflineScheduler(tiny_model("llama"), n_ctx=256)
    prompts = [prompt_of(11, 1), prompt_of(23, 2)]
    first = scheduler.add_request(prompts[0], max_new_tokens=12, stop_on_eos=False)
    for _ in range(5):
        scheduler.step()
    second = scheduler.add_request(prompts[1], max_new_tokens=12, stop_on_eos=False)
    assert set(scheduler.step()) == {first, second}
    scheduler.run()
    for request_id, prompt in zip((first, second), prompts, strict=True):
        expected = oracle("llama").generate(prompt, 12)
        assert scheduler.session(request_id).generated_ids[: len(expected)] == expected


def test_r06_the_three_prompt_example_runs_on_the_real_model(smollm2: Model) -> None:
    texts = generate_batch(
        ["The capital of France is", "2 + 2 =", "Once upon a time"], smollm2, max_new_tokens=6, show_progress=False
    )
    assert texts[0].startswith(" Paris")
    assert len(texts) == 3


def test_it_runs_as_fast_as_a_service_does_and_under_autocast_in_torch(smollm2: Model) -> None:
    assert InferenceEngine(smollm2, n_ctx=64).context.runner.name.startswith("native")
    assert InferenceEngine(smollm2, n_ctx=64, use_amp=True).context.runner.name == TorchRunner(smollm2).name


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [400]}, "token_ids[0]"),
        ({"prompt": [-1]}, "token_ids[0]"),
        ({"prompt": "a", "max_new_tokens": -1}, "max_new_tokens"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "top_p": 2.0}, "top_p"),
        ({"prompt": "a", "top_k": -1}, "top_k"),
        ({"prompt": "a", "seed": -1}, "seed"),
    ],
)
def test_bad_parameters_are_named_and_nothing_is_queued(
    tiny_model: TinyModel, params: dict[str, Any], field: str
) -> None:
    scheduler = OfflineScheduler(tiny_model("llama"), n_ctx=64)
    with pytest.raises(InvalidRequest) as caught:
        scheduler.add_request(**params)
    assert caught.value.field == field
    assert not scheduler.has_unfinished()


def test_a_prompt_that_leaves_no_room_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(PromptTooLong):
        OfflineScheduler(tiny_model("llama"), n_ctx=64).add_request([5] * 64)
