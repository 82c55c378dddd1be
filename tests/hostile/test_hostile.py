"""A slice of `make hostile`: beside each hostile client nobody else loses a token, a step or its text."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from genbatch import RPCClient
from genbatch.actors.batcher.journal import Journal
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.security.curve_keys import KeyStore
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.service import open_service
from genbatch.nif.engine_options import EngineOptions
from tests.actors.gateways.scripted_batcher import PATIENCE_S, served
from tests.hostile.__main__ import main as measure_kinds
from tests.hostile.clients import (
    CONNECTIONS,
    FLOOD,
    HALF_BODIES,
    HALF_MESSAGES,
    KINDS,
    RECONNECTS,
    SLOW,
    STREAMS,
    UNREAD_CLIENTS,
    Place,
)
from tests.waiting import until_idle

TOKENS = 150
PROMPT = "Once upon"
# What each hears, if it is told all that it waits for.
HEARD = {
    "slow_hellos": {"unauthenticated": SLOW},
    "big_prompts": {"prompt_too_long": 3},
    "tokenize_flood": {"result", "queue_full"},
    "detokenize_flood": {"result", "queue_full"},
    "grammar_flood": {"result", "invalid_request", "queue_full"},
    "connection_flood": {"closed": CONNECTIONS},
    "sessions": {"closed": 16},
    "greedy_client": {"result", "queue_full"},
    "long_streams": {"result": STREAMS},
    "zeromq_tokenize_flood": {"result", "queue_full"},
    "posts_to_rpc": {"closed": CONNECTIONS},
    "unfinished_strings": {"closed": HALF_MESSAGES},
    "unread_stats": {"closed": UNREAD_CLIENTS},
    "old_greetings": {"closed": CONNECTIONS},
    "zeromq_reconnects": {"closed": SLOW * RECONNECTS},
    "zeromq_messages": {"malformed_message": FLOOD // 2, "prompt_too_long": FLOOD // 2},
    "zeromq_connections": {"closed": CONNECTIONS},
    "slow_headers": {"http 401": SLOW},
    "big_bodies": {"http 400": 2, "http 413": 2},
    "tiny_chunks": {"http 400": SLOW},
    "half_bodies": {"closed": HALF_BODIES},
    "http_connections": {"closed": CONNECTIONS},
    "http_gets": {"closed": CONNECTIONS},
    "http_2_resets": {"http 505": SLOW},
    "slow_streams": {"http 200", "http 429"},
}


def test_make_hostile_measures_a_kind_at_every_door_of_a_real_service(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = ["--minutes", "0.02", "--repeats", "1", "--kind", "zeromq_messages"]
    monkeypatch.setattr("sys.argv", ["hostile", "--model", str(tiny_model_dir("llama")), *kind])
    assert measure_kinds() == 0
    assert "| zeromq messages | " in capsys.readouterr().out


@pytest.mark.trio
async def test_who_comes_newly_in_a_flood_of_connections_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genbatch.actors.gateways.addresses.BACKLOG", 8)  # fewer than a flood brings at once
    place, num_floods, num_served = Place(f"{tmp_path}/socket", ""), 6, 0
    answers: Counter[str] = Counter()
    async with served(tmp_path, "unix") as service, trio.open_nursery() as nursery:

        async def flood() -> None:
            while num_served < 20:
                await KINDS["connection_flood"](place, answers)

        for _ in range(num_floods):
            nursery.start_soon(flood)
        for _ in range(20):
            async with RPCClient(service.address, timeout=PATIENCE_S) as client:
                assert (await client.generate("a b")).text == "ab"
            num_served += 1
    assert set(answers) == {"closed"}


@pytest.mark.trio
@pytest.mark.parametrize("kind", KINDS)
async def test_beside_a_hostile_client_every_step_gives_an_innocent_stream_its_token(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    steps: list[set[int]] = []  # of each step the innocent's sequences that it gave a token
    kept: list[object] = []  # so that no two have the same id
    stepped, generated = Journal.stepped, Journal.generated

    def begin(journal: Journal, num_entries: int, num_tokens: int, seconds: float) -> None:
        steps.append(set())
        stepped(journal, num_entries, num_tokens, seconds)

    def count(journal: Journal, sequence: Any, num_tokens: int = 1) -> None:
        if sequence.max_new_tokens == TOKENS:
            steps[-1].add(id(sequence))
            kept.append(sequence)
        generated(journal, sequence, num_tokens)

    monkeypatch.setattr(Journal, "stepped", begin)
    monkeypatch.setattr(Journal, "generated", count)
    store = KeyStore(tmp_path / "keys")
    mine = Place(f"{tmp_path}/rpc.sock", store.new_token("innocent"))
    token = store.new_token("hostile")
    engine = EngineOptions(model_path=str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, n_ctx=1024)
    options = BatcherOptions(batch_timeout=1.0, n_parallel=4)
    service = ServiceOptions(
        bind="tcp://127.0.0.1:*", rpc_bind=f"unix://{mine.path}", http=":0", tokens=str(store.tokens)
    )
    answers: Counter[str] = Counter()
    async with (
        open_service(engine, options, service) as opened,
        RPCClient(f"unix://{mine.path}", token=mine.token) as client,
        trio.open_nursery() as nursery,
    ):
        alone = await client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        is_over = False
        theirs = Place(mine.path, token, opened.addresses[0], opened.addresses[-1].rpartition(":")[2])

        async def do_harm() -> None:
            nonlocal is_over
            await KINDS[kind](theirs, answers)
            is_over = True

        nursery.start_soon(do_harm)
        while not is_over:
            async with client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True) as stream:
                indexes = [token.index async for token in stream]
            assert stream.result.token_ids == alone.token_ids and indexes == list(range(TOKENS))
        for one in set().union(*steps):
            took_part = [number for number, batch in enumerate(steps) if one in batch]
            assert took_part[-1] - took_part[0] == TOKENS - 1, "a step went by without it"
        stats = await until_idle(client.stats)
        assert stats["kv_blocks_used"] == 0
    heard = HEARD[kind]
    if isinstance(heard, dict):
        assert answers == heard
    else:
        assert set(answers) <= heard and answers.total() >= (SLOW if kind == "slow_streams" else FLOOD // 2), answers
