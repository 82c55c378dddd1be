"""The batch manager's callbacks, request lifecycle and limits, through its constructor and its four callbacks."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio

from genbatch.actors.batcher.paced import PacedBatcher
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import SchedulerError, SchedulerPolicy
from genbatch.clients.gpt_manager.manager import IDLE_POLL_S, GptManager
from genbatch.clients.gpt_manager.requests import BuildConfig, InferenceRequest, TrtGptModelType
from genbatch.nif.context import Context
from genbatch.nif.context.engine import Engine
from genbatch.nif.errors import ModelError, OptionError
from genbatch.nif.models.loaded_model import Model
from tests.clients.gpt_manager.batch_client import BatchClient, Response, inference_request, manager

TinyModel = Callable[[str], Model]
OracleOf = Callable[[str], Any]

BIGGEST = 2**64 - 1


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Context]]:
    """The contexts that managers opened; none may have kept a block."""
    opened: list[Context] = []
    open_context = Engine.open_context

    def watch(engine: Engine, **options: Any) -> Context:
        opened.append(open_context(engine, **options))
        return opened[-1]

    monkeypatch.setattr(Engine, "open_context", watch)
    yield opened
    for context in opened:
        context.kv.check_integrity()
        assert context.kv.counts().used == 0


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (length,), generator=generator).tolist()


def test_b01_the_get_callback_is_asked_for_the_free_capacity(tiny_model: TinyModel) -> None:
    prompts = [prompt_of(4, seed) for seed in range(5)]
    client = BatchClient(*(inference_request(i, prompt, 3 + 2 * i, end_id=-1) for i, prompt in enumerate(prompts)))
    free: list[int] = []

    def get(max_num_requests: int) -> list[InferenceRequest]:
        taken = client.get(max_num_requests)
        ended = sum(1 for one in client.responses if client.finals(one))
        handed = len(prompts) - len(client.waiting) - len(taken)
        free.append(3 - (handed - ended))
        return taken

    callbacks = (get, client.send, None, client.report)
    with GptManager(
        tiny_model("llama"),
        TrtGptModelType.INFLIGHT_FUSED_BATCHING,
        1,
        SchedulerPolicy.MAX_UTILIZATION,
        *callbacks,
        build_config=BuildConfig(max_batch_size=3),
    ):
        client.wait(*range(5))
    assert client.asked == free
    assert client.asked[:2] == [3, 0]
    assert len(client.asked) >= len(client.stats) > 0


def test_b01_without_a_cap_the_get_callback_is_asked_for_any_number(tiny_model: TinyModel) -> None:
    client = BatchClient(*(inference_request(i, prompt_of(3, i), 2) for i in range(12)))
    with manager(tiny_model("llama"), client, max_batch_size=None):
        client.wait(*range(12))
    assert set(client.asked) == {-1}


def test_b03_an_id_in_flight_is_refused_and_free_again_after_its_final(tiny_model: TinyModel, oracle: OracleOf) -> None:
    prompt, other = prompt_of(6, 1), prompt_of(9, 2)
    client = BatchClient(inference_request(BIGGEST, prompt, 10, end_id=-1), inference_request(BIGGEST, other, 4))
    with manager(tiny_model("llama"), client):
        client.wait(BIGGEST, finals=2)
        refused, original = client.responses.pop(BIGGEST)
        assert refused.final
        assert "in flight" in refused.error
        assert len(refused.tensors) == 0
        client.add(inference_request(BIGGEST, other, 4))
        client.wait(BIGGEST)
    assert client.output(BIGGEST, other) == oracle("llama").generate(other, 4)
    length = int(original.tensors.sequence_length[0, 0])
    expected = oracle("llama").generate(prompt, 10)
    assert original.tensors.output_ids[0, 0, 6:length].tolist()[: len(expected)] == expected


def test_b05_a_stream_brings_one_token_a_response_and_adds_up_to_the_whole(tiny_model: TinyModel) -> None:
    prompt = prompt_of(7, 3)
    client = BatchClient(
        inference_request(1, prompt, 9, end_id=-1), inference_request(2, prompt, 9, end_id=-1, streaming=True)
    )
    with manager(tiny_model("llama"), client):
        client.wait(1, 2)
    [whole] = client.responses[1]
    stream = client.responses[2]
    assert [response.final for response in stream] == [False] * 8 + [True]
    assert [response.tensors.output_ids.shape for response in stream] == [(1, 1, 1)] * 9
    assert [int(response.tensors.output_ids[0, 0, 0]) for response in stream] == client.output(1, prompt)
    assert [int(response.tensors.sequence_length[0, 0]) for response in stream] == list(range(8, 17))
    np.testing.assert_allclose(stream[-1].tensors.cum_log_probs, whole.tensors.cum_log_probs, rtol=1e-5)


def test_b06_stopped_requests_end_with_what_they_have_and_free_their_blocks(
    tiny_model: TinyModel, oracle: OracleOf, contexts: list[Context]
) -> None:
    prompts = {1: prompt_of(6, 1), 2: prompt_of(8, 2), 3: prompt_of(5, 3)}
    client = BatchClient(
        inference_request(1, prompts[1], 200, end_id=-1, streaming=True),
        inference_request(2, prompts[2], 12),
        inference_request(3, prompts[3], 200, end_id=-1),
    )
    client.on_send = lambda request_id, response: (
        client.to_stop.update({1, 3, 77}) if len(client.responses.get(1, ())) == 4 else None
    )
    with manager(tiny_model("llama"), client):
        client.wait(1, 2, 3)
    assert client.output(2, prompts[2]) == oracle("llama").generate(prompts[2], 12)
    # Polled after the iteration of the fifth token, in which the stop is seen first.
    assert len(client.responses[1]) <= 6
    assert client.finals(1)[0].error == ""
    stopped = client.output(3, prompts[3])
    expected = oracle("llama").generate(prompts[3], 5)
    assert 4 <= len(stopped) <= 5
    assert stopped[: len(expected)] == expected[: len(stopped)]


def test_b07_statistics_come_only_while_something_is_active(tiny_model: TinyModel) -> None:
    client = BatchClient()
    with manager(tiny_model("llama"), client):
        client.wait_until(lambda: len(client.asked) >= 5)
        assert client.stats == []
        client.add(inference_request(1, [5, 6], 4, end_id=-1))
        client.wait(1)
        idle_from = len(client.asked)
        client.wait_until(lambda: len(client.asked) >= idle_from + 5)
        assert len(client.stats) == 4


def test_an_idle_manager_rests_between_two_times_that_it_asks(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    sleep = trio.sleep

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(trio, "sleep", rest)
    client = BatchClient()
    with manager(tiny_model("llama"), client):
        client.wait_until(lambda: len(client.asked) >= 5)
        assert rests.count(IDLE_POLL_S) >= 4


def test_b08_blocks_are_free_before_the_final_response(tiny_model: TinyModel, contexts: list[Context]) -> None:
    client = BatchClient(
        inference_request(1, prompt_of(9, 1), 6, end_id=-1),
        inference_request(2, prompt_of(9, 2), 6, end_id=-1, beam_width=3),
        inference_request(3, prompt_of(9, 3), 6, end_id=-1, streaming=True),
    )
    used_at_final: list[int] = []

    def look(request_id: int, response: Response) -> None:
        if response.final:
            used_at_final.append(contexts[0].kv.counts().used)

    client.on_send = look
    with manager(tiny_model("llama"), client, max_beam_width=3):
        client.wait(1, 2, 3)
    assert used_at_final == [0, 0, 0], "all end in the same iteration"


def test_b09_the_worker_starts_with_the_constructor_and_close_drains_then_joins(
    tiny_model: TinyModel, contexts: list[Context]
) -> None:
    client = BatchClient(inference_request(1, prompt_of(5, 5), 60, end_id=-1, streaming=True))
    looked = threading.Event()
    client.on_send = lambda request_id, response: looked.wait(60) and None
    running = manager(tiny_model("llama"), client)
    with running:
        client.wait_until(lambda: bool(client.responses.get(1)))
        assert client.threads == {"genbatch-batch-manager"}
        assert not client.finals(1)
        client_asked = client.asked
        looked.set()
    assert len(client.responses[1]) == 60
    assert client.finals(1)
    asked = len(client_asked)
    client.add(inference_request(2, [5], 1))
    assert "genbatch-batch-manager" not in {thread.name for thread in threading.enumerate()}
    assert "genbatch-model" not in {thread.name for thread in threading.enumerate()}
    assert len(client.asked) == asked, "a closed manager asks for nothing"


# Faults: every request gets exactly one final response, whatever breaks.


def test_b04_a_send_callback_that_raises_ends_its_own_request_only(
    tiny_model: TinyModel, oracle: OracleOf, contexts: list[Context]
) -> None:
    prompt = prompt_of(8, 2)
    client = BatchClient(
        inference_request(1, prompt_of(4, 1), 50, end_id=-1, streaming=True),
        inference_request(2, prompt, 12),
        inference_request(3, prompt_of(4, 3), 5),
    )

    def fail(request_id: int, response: Response) -> None:
        if (request_id == 1 and len(client.responses[1]) == 3) or request_id == 3:
            raise ZeroDivisionError

    client.on_send = fail
    with manager(tiny_model("llama"), client):
        client.wait(1, 2, 3)
    assert [len(client.finals(one)) for one in (1, 2, 3)] == [1, 1, 1]
    assert [response.final for response in client.responses[1]] == [False, False, False, True]
    assert "send callback" in client.responses[1][-1].error
    assert client.output(2, prompt) == oracle("llama").generate(prompt, 12)


def test_b04_a_forward_that_fails_for_one_request_fails_that_one(
    tiny_model: TinyModel, oracle: OracleOf, contexts: list[Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Context.step_and_read

    def broken(context: Context, batch: Any, *args: Any, **options: Any) -> Any:
        if any(entry.n_past + len(entry.tokens) == 21 for entry in batch):
            raise RuntimeError("illegal instruction")
        return step(context, batch, *args, **options)

    monkeypatch.setattr(Context, "step_and_read", broken)
    prompt = prompt_of(5, 2)
    client = BatchClient(
        inference_request(1, prompt_of(18, 1), 30, end_id=-1),
        inference_request(2, prompt, 10),
        inference_request(3, prompt_of(19, 3), 30, end_id=-1, streaming=True),
        inference_request(4, prompt_of(19, 4), 30, end_id=-1, beam_width=2),
    )
    with manager(tiny_model("llama"), client, max_beam_width=2):
        client.wait(1, 2, 3, 4)
    assert client.output(2, prompt) == oracle("llama").generate(prompt, 10)
    for failed in (1, 3, 4):
        [final] = client.finals(failed)
        assert "illegal instruction" in final.error
        assert final.tensors == ()


@pytest.mark.parametrize("callback", ["get", "poll", "report"])
def test_b04_a_callback_that_breaks_the_loop_still_leaves_one_final_each(
    tiny_model: TinyModel, contexts: list[Context], callback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = BatchClient(*(inference_request(i, prompt_of(4, i), 90, end_id=-1) for i in range(3)))
    original, calls = getattr(client, callback), 0

    def fail(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4 and client.stats:
            raise ZeroDivisionError(callback)
        if calls > 4:
            raise ZeroDivisionError(callback)
        return original(*args)

    monkeypatch.setattr(client, callback, fail)
    with pytest.raises(ZeroDivisionError), manager(tiny_model("llama"), client):
        client.wait(0, 1, 2)
    for one in range(3):
        [final] = client.responses[one]
        assert final.final
        assert "ZeroDivisionError" in final.error


def test_b04_a_model_actor_that_crashes_leaves_one_final_each(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = BatchClient(*(inference_request(i, prompt_of(4, i), 90, end_id=-1) for i in range(3)))
    stepped = PacedBatcher._stepped

    def crash(batcher: PacedBatcher, *args: Any) -> None:
        if batcher.stats.steps == 5:
            raise ZeroDivisionError
        stepped(batcher, *args)

    monkeypatch.setattr(PacedBatcher, "_stepped", crash)
    with pytest.raises(ZeroDivisionError), manager(tiny_model("llama"), client):
        client.wait(0, 1, 2)
    assert [len(client.finals(one)) for one in range(3)] == [1, 1, 1]
    assert all(client.responses[one][-1].error for one in range(3))


# Parameters


def test_b14_a_path_without_a_model_fails_at_the_start(tmp_path: Path) -> None:
    client = BatchClient()
    with pytest.raises(ModelError, match=str(tmp_path)), manager(tmp_path, client):
        pass
    assert client.asked == []
    assert "genbatch-batch-manager" not in {thread.name for thread in threading.enumerate()}


def test_b15_all_model_types_give_the_same_tokens_and_fused_runs_the_fewest_forwards(
    tiny_model: TinyModel, oracle: OracleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(length, length) for length in (3, 20, 7, 30, 5, 12)]
    lengths = [9, 4, 12, 6, 3, 8]
    step, forwards = Context.step_and_read, 0

    def count(context: Context, *args: Any, **options: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return step(context, *args, **options)

    monkeypatch.setattr(Context, "step_and_read", count)
    counted: dict[BatchingType, int] = {}
    joined: dict[BatchingType, bool] = {}
    for model_type in BatchingType:
        client = BatchClient(
            *(inference_request(i, *pair) for i, pair in enumerate(zip(prompts, lengths, strict=True)))
        )
        forwards = 0
        with manager(tiny_model("llama"), client, model_type=model_type, max_batch_size=3):
            client.wait(*range(6))
        counted[model_type] = forwards
        joined[model_type] = any(one["Scheduled Requests"] > one["Context Requests"] > 0 for one in client.stats)
        for i, prompt in enumerate(prompts):
            assert client.output(i, prompt) == oracle("llama").generate(prompt, lengths[i])
    fused = counted[BatchingType.INFLIGHT_FUSED_BATCHING]
    assert fused < counted[BatchingType.INFLIGHT_BATCHING]
    assert fused < counted[BatchingType.V1]
    assert joined == {
        BatchingType.V1: False,
        BatchingType.INFLIGHT_BATCHING: True,
        BatchingType.INFLIGHT_FUSED_BATCHING: True,
    }


@torch.inference_mode()
def transformers_beams(oracle: Any, prompt: list[int], beams: int, length: int) -> list[list[int]]:
    ids = torch.tensor([prompt])
    options = {"num_beams": beams, "num_return_sequences": beams, "max_new_tokens": length, "do_sample": False}
    rows = oracle._hf.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=2, **options)
    return rows[:, len(prompt) :].tolist()


def test_b16_beams_are_transformers_own_and_a_wider_request_is_refused(
    tiny_model: TinyModel, oracle: OracleOf, contexts: list[Context]
) -> None:
    prompts = {i: prompt_of(5 + 4 * i, i) for i in range(1, 4)}
    widths = {1: 2, 2: 4, 3: 1}
    client = BatchClient(
        *(inference_request(i, prompt, 10, beam_width=widths[i]) for i, prompt in prompts.items()),
        inference_request(9, prompts[1], 10, beam_width=5),
    )
    with manager(tiny_model("llama"), client, max_beam_width=4):
        client.wait(1, 2, 3, 9)
    for i, prompt in prompts.items():
        expected = transformers_beams(oracle("llama"), prompt, widths[i], 10)
        for beam, tokens in enumerate(expected):
            got = client.responses[i][0].tensors.output_ids[0, beam, len(prompt) :].tolist()
            assert got[: len(tokens)] == tokens
    assert "at most 4" in client.responses[9][0].error


def test_b32_only_the_offending_request_is_refused(tiny_model: TinyModel, oracle: OracleOf) -> None:
    good = prompt_of(10, 1)
    offending = {
        2: (inference_request(2, prompt_of(11, 2), 4), "max_input_len"),
        3: (inference_request(3, good, 9), "max_output_len"),
        4: (inference_request(4, good, 4, beam_width=3), "beam_width"),
        5: (inference_request(5, good, 0), "request_output_len"),
        6: (inference_request(6, [5, 320], 4), "token id 320"),
        7: (InferenceRequest(7, {"input_ids": np.array([5])}), "request_output_len"),
        8: (inference_request(8, good, 4, colour=3), "colour"),
        9: (inference_request(9, good, 4, temperature=-1.0), "temperature"),
        10: (inference_request(10, good, 4, beam_width=2, streaming=True), "streaming"),
        11: (InferenceRequest(11, {"input_ids": np.ones((2, 2), int), "request_output_len": np.array(1)}), "one row"),
        12: (inference_request(12, good, 4, beam_width=1.5), "integer"),
        13: (inference_request(13, good, 4, beam_width=2, temperature=0.7), "temperature"),
    }
    client = BatchClient(inference_request(1, good, 8), *(request for request, _ in offending.values()))
    with manager(tiny_model("llama"), client, max_input_len=10, max_output_len=8, max_beam_width=2,
                 max_batch_size=32):  # fmt: skip
        client.wait(1, *offending)
    assert client.output(1, good) == oracle("llama").generate(good, 8)
    for request_id, (_, reason) in offending.items():
        [refused] = client.responses[request_id]
        assert refused.final
        assert reason in refused.error


def test_b32_more_requests_than_asked_for_are_refused_alone(tiny_model: TinyModel, oracle: OracleOf) -> None:
    prompts = [prompt_of(4, seed) for seed in range(4)]
    client = BatchClient(*(inference_request(i, prompt, 5) for i, prompt in enumerate(prompts)))
    take = client.get
    client.get = lambda max_num_requests: take(-1)  # type: ignore[method-assign]
    with manager(tiny_model("llama"), client, max_batch_size=2):
        client.wait(*range(4))
    for i in (0, 1):
        assert client.output(i, prompts[i]) == oracle("llama").generate(prompts[i], 5)
    assert all("max_batch_size" in client.responses[i][0].error for i in (2, 3))


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("max_beam_width", {"max_beam_width": 0}),
        ("max_batch_size", {"max_batch_size": 0}),
        ("max_tokens", {"cache": {"maxTokens": 0}}),
        ("free_gpu_memory_fraction", {"cache": {"freeGpuMemoryFraction": 1.5}}),
        ("max_attention_window", {"cache": {"maxAttentionWindow": 0}}),
        ("sink_token_length", {"cache": {"maxAttentionWindow": 8, "sinkTokenLength": -1}}),
        ("sink_token_length", {"cache": {"sinkTokenLength": 4}}),
        ("enable_trt_overlap", {"overlap": True, "model_type": BatchingType.V1}),
        ("maxToken", {"cache": {"maxToken": 8}}),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(
    tiny_model: TinyModel, option: str, options: dict[str, Any]
) -> None:
    with (
        pytest.raises((OptionError, SchedulerError), match=f"^{option}: "),
        manager(tiny_model("llama"), BatchClient(), **options),
    ):
        pass


def test_b33_the_constructor_example_runs(tiny_model_dir: Callable[[str], Path]) -> None:
    path_to_trt_engine, max_beam_width, scheduler_policy = tiny_model_dir("llama"), 2, SchedulerPolicy.MAX_UTILIZATION
    client = BatchClient(inference_request(1, [5, 6, 7], 4), inference_request(2, [5, 6], 4, beam_width=2))
    batch_manager = GptManager(
        path_to_trt_engine,  # a directory with the model
        TrtGptModelType.INFLIGHT_FUSED_BATCHING,  # in-flight batching
        max_beam_width,  # must be >= 1
        scheduler_policy,
        client.get,  # the Get callback
        client.send,  # the Send callback
        client.poll,  # the Stop signals callback
        client.report,  # the Return stats callback
    )
    client.wait(1, 2)
    batch_manager.close()
    batch_manager.close()
    assert [len(client.responses[one]) for one in (1, 2)] == [1, 1]
