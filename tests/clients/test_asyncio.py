"""Clients in programs that run asyncio, and in programs without an event loop, over a real small model."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from genbatch.actors.runtime.supervisor import background
from genbatch.clients import bridge
from genbatch.clients.bridge import hosted
from genbatch.clients.in_process import BatcherClient, BatcherOpening, open_batcher
from genbatch.clients.interface import ClientClosed
from genbatch.clients.remote import RemoteClient, RPCClient, ZeroMQClient
from genbatch.nif.errors import ModelError
from genbatch.proto.errors import InvalidRequest
from tests.waiting import ENGINE_PATIENCE_S

ModelDir = Callable[[str], Path]
LONG = 240  # tokens: nearly all that the model has positions for
WINDOW = 16


@pytest.fixture
def opening(tiny_model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BatcherOpening]:
    monkeypatch.setattr(bridge, "WINDOW", WINDOW)

    def open_tiny(**options: Any) -> BatcherOpening:
        return open_batcher(str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, **options)

    return open_tiny


async def until_idle(batcher: BatcherClient | RemoteClient) -> dict[str, Any]:
    while True:
        stats = await batcher.stats()
        if not stats["requests_running"]:
            return stats


def test_callers_of_a_task_group_get_what_each_gets_alone(opening: Callable[..., BatcherOpening]) -> None:
    async def main() -> None:
        async with opening(n_parallel=8) as batcher, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(batcher.generate([5, 6, 7 + index % 4], max_tokens=6, ignore_eos=True))
                for index in range(64)
            ]
        answers = [task.result().token_ids for task in tasks]
        assert answers == answers[:4] * 16 and len({tuple(answer) for answer in answers[:4]}) > 1

    asyncio.run(main())


def test_cancelling_a_task_frees_its_sequence(opening: Callable[..., BatcherOpening]) -> None:
    async def main() -> None:
        async with opening(n_parallel=1) as batcher:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await batcher.generate([5, 6], max_tokens=LONG, ignore_eos=True)
            task = asyncio.create_task(batcher.generate([5, 6], max_tokens=LONG, ignore_eos=True))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            answer = await batcher.generate([5, 6], max_tokens=2, ignore_eos=True)  # the one slot is free
            assert len(answer.token_ids) == 2
            assert (await until_idle(batcher))["finished"]["cancelled"] >= 1

    asyncio.run(main())


def test_leaving_a_stream_early_frees_its_sequence_and_closing_its_generator_too(
    opening: Callable[..., BatcherOpening],
) -> None:
    async def texts(batcher: BatcherClient) -> AsyncIterator[str]:
        async with batcher.stream([5, 6], max_tokens=LONG, ignore_eos=True) as stream:
            async for token in stream:
                yield token.text

    async def main() -> None:
        async with opening(n_parallel=1) as batcher:
            async with batcher.stream([5, 6], max_tokens=LONG, ignore_eos=True) as stream:
                async for token in stream:
                    assert token.index == 0
                    break
            generator = texts(batcher)
            await anext(generator)
            await generator.aclose()  # type: ignore[attr-defined]
            assert (await until_idle(batcher))["finished"]["cancelled"] == 2

    asyncio.run(main())


def test_a_stream_gives_every_token_in_order_and_then_its_result(opening: Callable[..., BatcherOpening]) -> None:
    async def main() -> None:
        async with opening() as batcher:
            async with batcher.stream([5, 6], max_tokens=LONG, ignore_eos=True) as stream:
                tokens = [token async for token in stream]
            assert [token.index for token in tokens] == list(range(LONG))
            assert [token.token_id for token in tokens] == stream.result.token_ids
            with pytest.raises(InvalidRequest, match="max_tokens"):
                await batcher.generate("a", max_tokens=-1)
            with pytest.raises(InvalidRequest, match="max_tokens"):
                async with batcher.stream("a", max_tokens=-1) as stream:
                    async for token in stream:
                        raise AssertionError(token)

    asyncio.run(main())


def test_a_reader_that_stands_still_is_read_ahead_of_by_a_bounded_number_of_tokens(
    opening: Callable[..., BatcherOpening], tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/zeromq.sock"

    async def main() -> None:
        async with opening(bind=address), ZeroMQClient(address) as client:
            async with client.stream([5, 6], max_tokens=LONG, ignore_eos=True) as stream:
                await anext(aiter(stream))
                while (await client.stats())["generation_tokens"] < LONG:  # the service is ahead by its own window
                    assert len(stream.tokens) <= WINDOW  # type: ignore[attr-defined]
                count = 1
                async for _ in stream:
                    count += 1
            assert count == LONG == stream.result.usage.completion_tokens

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["zeromq", "rpc"])
def test_clients_of_a_service_work_on_asyncio(
    opening: Callable[..., BatcherOpening], tmp_path: Path, kind: str
) -> None:
    zeromq, rpc = f"ipc://{tmp_path}/zeromq.sock", f"unix://{tmp_path}/rpc.sock"

    async def main() -> None:
        async with opening(bind=zeromq, rpc_bind=rpc) as batcher:
            alone = await batcher.generate([5, 6, 7], max_tokens=5, ignore_eos=True)
            client: RemoteClient = ZeroMQClient(zeromq) if kind == "zeromq" else RPCClient(rpc)
            async with client:
                assert (await client.health()).status == "ready"
                assert await client.detokenize(await client.tokenize("Hello")) == "Hello"
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(client.generate([5, 6, 7], max_tokens=5, ignore_eos=True)) for _ in range(8)
                    ]
                assert {tuple(task.result().token_ids) for task in tasks} == {tuple(alone.token_ids)}
                async with client.stream([5, 6, 7], max_tokens=5, ignore_eos=True) as stream:
                    assert [token.token_id async for token in stream] == alone.token_ids
            with pytest.raises(ClientClosed):
                await client.health()

    asyncio.run(main())


def test_several_batchers_live_in_one_program_and_their_threads_end_with_them(
    opening: Callable[..., BatcherOpening],
) -> None:
    async def main() -> None:
        async with opening() as one, opening() as two:
            first, second = await asyncio.gather(
                one.generate([5, 6], max_tokens=3, ignore_eos=True), two.generate([5, 6], max_tokens=3, ignore_eos=True)
            )
            assert first.token_ids == second.token_ids
            assert sum(thread.name == "genbatch-trio" for thread in threading.enumerate()) == 2

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "genbatch-trio"]


INTERRUPTED = {
    "asyncio": """
async def main():
    async with open_batcher(sys.argv[1]) as batcher:
        async with batcher.stream([5, 6], max_tokens=200, ignore_eos=True) as stream:
            await anext(aiter(stream))
            print("streams", flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
""",
    "plain": """
with open_batcher(sys.argv[1]) as batcher:
    with batcher.stream([5, 6], max_tokens=200, ignore_eos=True) as stream:
        next(iter(stream))
        print("streams", flush=True)
        while True:
            batcher.generate([5, 6], max_tokens=200, ignore_eos=True)
""",
}


@pytest.mark.parametrize("program", INTERRUPTED)
def test_an_interrupt_ends_a_program_and_its_threads(program: str, tiny_model_dir: ModelDir) -> None:
    # A shell's background jobs ignore interrupts, and children inherit that.
    heeds = "import asyncio, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    source = heeds + "from genbatch import open_batcher\n" + INTERRUPTED[program]
    command = [sys.executable, "-c", source, str(tiny_model_dir("llama"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "streams\n"
            running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=ENGINE_PATIENCE_S)
        finally:
            running.kill()
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert running.returncode in (-signal.SIGINT, 128 + signal.SIGINT)


FORKED = {
    "asyncio": """
async def main():
    async with open_batcher(sys.argv[1]) as batcher:
        if os.fork() == 0:
            try:
                await batcher.generate([5, 6], max_tokens=2)
            except Exception as error:
                print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)  # asyncio itself shares its epoll with the fork, so a fork must not end its loop
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        print(len((await batcher.generate([5, 6], max_tokens=2, ignore_eos=True)).token_ids))

asyncio.run(main())
""",
    "plain": """
with open_batcher(sys.argv[1]) as batcher:
    if os.fork() == 0:
        batcher.generate([5, 6], max_tokens=2)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    print(len(batcher.generate([5, 6], max_tokens=2, ignore_eos=True).token_ids))
""",
    "left": """
with open_batcher(sys.argv[1]) as batcher:
    if os.fork() == 0:
        sys.exit("ClientClosed")
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    print(len(batcher.generate([5, 6], max_tokens=2, ignore_eos=True).token_ids))
""",
}


@pytest.mark.parametrize("program", FORKED)
def test_a_fork_is_refused_and_ends_and_its_parent_goes_on(program: str, tiny_model_dir: ModelDir) -> None:
    source = "import asyncio, os, sys\nfrom genbatch import open_batcher\n" + FORKED[program]
    command = [sys.executable, "-W", "ignore", "-c", source, str(tiny_model_dir("native_llama"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "1\n2\n", ended.stderr
    assert "ClientClosed" in ended.stderr


def test_a_program_that_leaves_a_batcher_open_ends(tiny_model_dir: ModelDir) -> None:
    source = """
import sys
from genbatch import open_batcher

batcher = open_batcher(sys.argv[1]).__enter__()
print(len(batcher.generate([5, 6], max_tokens=2, ignore_eos=True).token_ids))
"""
    command = [sys.executable, "-c", source, str(tiny_model_dir("native_llama"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=ENGINE_PATIENCE_S)
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr


def test_a_model_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_batcher(str(tmp_path / "none.gguf")):
            raise AssertionError

    with pytest.raises(ModelError):
        asyncio.run(main())
    with pytest.raises(ModelError), open_batcher(str(tmp_path / "none.gguf")):
        raise AssertionError


def test_the_body_ends_with_the_error_of_what_runs_beside_it() -> None:
    @asynccontextmanager
    async def failing() -> AsyncIterator[trio.Event]:
        event = trio.Event()

        async def fail() -> None:
            await event.wait()
            raise ZeroDivisionError("a fault of the tree")

        async with background() as nursery:
            nursery.start_soon(fail)
            yield event

    async def main() -> None:
        async with hosted(failing()) as (thread, event):
            await thread.run(_set, event)
            await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "genbatch-trio"]


async def _set(event: trio.Event) -> None:
    event.set()


def test_a_program_without_an_event_loop_uses_the_same_names(opening: Callable[..., BatcherOpening]) -> None:
    with opening() as batcher:
        answer = batcher.generate([5, 6, 7], max_tokens=5, ignore_eos=True)
        with batcher.stream([5, 6, 7], max_tokens=5, ignore_eos=True) as stream:
            assert [token.token_id for token in stream] == answer.token_ids
        assert stream.result.token_ids == answer.token_ids
        assert batcher.detokenize(batcher.tokenize("Hello")) == "Hello"
        with batcher.stream([5, 6], max_tokens=200, ignore_eos=True) as stream:
            next(iter(stream))
        while batcher.stats()["requests_running"]:
            pass
        with pytest.raises(InvalidRequest):
            batcher.generate("a", max_tokens=-1)
    assert not [thread for thread in threading.enumerate() if thread.name == "genbatch-trio"]
