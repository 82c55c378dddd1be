"""Sessions over the wire: kept under a name in the operator's folder, by tenant, and loaded after a restart."""

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from safetensors.torch import load_file, save_file

from genbatch import Message, Retry, RPCClient, ZeroMQClient, open_batcher
from genbatch.actors.batcher import calls
from genbatch.actors.fleet.fleet import Fleet, FleetLimits
from genbatch.actors.fleet.routing import RoundRobin
from genbatch.proto.errors import InvalidRequest, QueueFull
from genbatch.proto.messages import ResumeSessionRequest, SessionState

pytestmark = pytest.mark.trio
TURNS = [Message(role="user", content="The sky is blue and the sea is green, said the man.")]
USUAL: dict[str, Any] = {"max_tokens": 6, "seed": 3, "temperature": 0.9, "ignore_eos": True}
DOORS = {"zeromq": (ZeroMQClient, "bind", "ipc"), "rpc": (RPCClient, "rpc_bind", "unix")}


@asynccontextmanager
async def served(model: Path, tmp_path: Path, door: str, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A service with one door; yields a client of it, and the program's own."""
    kind, bind, scheme = DOORS[door]
    address = f"{scheme}://{tmp_path}/{door}"
    chosen: dict[str, Any] = {"n_ctx": 512, "session_dir": str(tmp_path / "sessions"), bind: address, **options}
    async with (
        open_batcher(str(model), dtype="float32", n_gpu_layers=0, **chosen) as own,
        kind(address, retry=Retry(max_attempts=1)) as client,
    ):
        yield client, own


@pytest.mark.parametrize("door", DOORS)
async def test_a_session_is_loaded_after_a_restart_and_gives_the_same_answer(
    door: str, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_model_dir("llama")
    async with served(model, tmp_path, door) as (client, _):
        none = await client.keep_session("trip", TURNS)
        assert none == SessionState(positions=0, num_bytes=0)
        right = await client.generate(messages=TURNS, **USUAL)
        kept = await client.keep_session("trip", TURNS)
        assert 0 < kept.positions <= right.usage.prompt_tokens and kept.num_bytes > 1000
    async with served(model, tmp_path, door) as (client, _):
        loaded = await client.resume_session("trip")
        assert loaded.positions == kept.positions
        again = await client.generate(messages=TURNS, **USUAL)
        assert again.token_ids == right.token_ids and again.usage.cached_tokens >= kept.positions - 1
        with pytest.raises(InvalidRequest, match="there is no session 'another'") as refusal:
            await client.resume_session("another")
        assert refusal.value.field == "name"


async def test_a_name_is_no_path(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    async with served(tiny_model_dir("llama"), tmp_path, "rpc") as (client, own):
        for name in ("../trip", "/tmp/trip", "a/b", "", ".hidden", "x" * 129, "a\0b", "trip\n", "é"):
            for one in (client, own):
                with pytest.raises(InvalidRequest) as refusal:
                    await one.keep_session(name, TURNS)
                assert refusal.value.field == "name"
                with pytest.raises(InvalidRequest):
                    await one.resume_session(name)
        with pytest.raises(InvalidRequest) as refusal:
            await client.keep_session("trip", [])
        assert refusal.value.field == "messages"
    assert not (tmp_path / "sessions").exists()


async def test_sessions_that_nobody_uses_make_room_for_the_next_one(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    async with served(tiny_model_dir("llama"), tmp_path, "rpc", n_ctx=128) as (client, _):
        right = await client.generate(messages=TURNS, **USUAL)
        kept = await client.keep_session("trip", TURNS)
        assert kept.positions > 128 / 5  # so the pool takes fewer than five
        for _ in range(5):
            assert (await client.resume_session("trip")).positions == kept.positions
        again = await client.generate(messages=TURNS, **USUAL)
        assert again.token_ids == right.token_ids


async def test_a_session_of_a_model_that_was_trained_further_is_refused(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir("llama"), model)
    async with served(model, tmp_path, "rpc") as (client, _):
        await client.generate(messages=TURNS, **USUAL)
        assert (await client.keep_session("trip", TURNS)).positions
    weights = load_file(model / "model.safetensors")
    for name in [name for name in weights if name.startswith("model.layers.2.")]:
        changed = {**weights, name: weights[name] + 0.1}
        save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
        async with served(model, tmp_path, "rpc") as (client, _):
            with pytest.raises(InvalidRequest, match="of another model"):
                await client.resume_session("trip")


async def test_without_a_folder_no_session_is_kept(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    async with served(tiny_model_dir("llama"), tmp_path, "rpc", session_dir=None) as (client, _):
        with pytest.raises(InvalidRequest, match="session_dir"):
            await client.keep_session("trip", TURNS)
        with pytest.raises(InvalidRequest, match="session_dir"):
            await client.resume_session("trip")


async def test_each_tenants_sessions_are_its_own(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    async with served(tiny_model_dir("llama"), tmp_path, "rpc") as (client, _):
        await client.generate(messages=TURNS, tenant="alice", **USUAL)
        assert (await client.keep_session("trip", TURNS, tenant="bob")).positions == 0
        assert (await client.keep_session("trip", TURNS, tenant="alice")).positions > 0
        for tenant in ("bob", ""):
            with pytest.raises(InvalidRequest, match="no session"):
                await client.resume_session("trip", tenant=tenant)
        assert (await client.resume_session("trip", tenant="alice")).positions > 0


async def test_too_many_files_at_a_time_are_refused_and_a_failed_call_counts_no_more(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_SESSION_FILES", 1)
    async with served(tiny_model_dir("llama"), tmp_path, "rpc") as (client, _):
        await client.generate(messages=TURNS, **USUAL)
        results: list[object] = []

        async def keep(number: int) -> None:
            try:
                results.append(await client.keep_session(f"trip{number}", TURNS))
            except QueueFull as refusal:
                assert refusal.retry_after_ms
                results.append(refusal)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(keep, number)
        assert {type(result) for result in results} == {SessionState, QueueFull}
        for _ in range(3):
            with pytest.raises(InvalidRequest):
                await client.resume_session("none")
        assert (await client.keep_session("last", TURNS)).positions > 0


async def test_a_session_of_another_model_is_refused(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    async with served(tiny_model_dir("llama"), tmp_path, "rpc") as (client, _):
        await client.generate(messages=TURNS, **USUAL)
        await client.keep_session("trip", TURNS)
    async with served(tiny_model_dir("llama"), tmp_path, "rpc", block_size=8) as (client, _):
        with pytest.raises(InvalidRequest, match="another model, precision or block size") as refusal:
            await client.resume_session("trip")
        assert refusal.value.field == "name"


async def test_a_fleet_keeps_no_sessions() -> None:
    fleet = Fleet(RoundRobin(), FleetLimits())
    with pytest.raises(InvalidRequest, match="a fleet keeps no sessions"):
        await fleet.call(ResumeSessionRequest(name="trip"))
