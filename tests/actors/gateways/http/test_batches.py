"""/v1/files and /v1/batches: OpenAI's own client, restarts, other owners, and live traffic that goes first."""

import codecs
import errno
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest
import trio

from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.gateways.http import batch_runner, batch_store
from genbatch.actors.gateways.http.batch_store import Batch, BatchStore, StoredFile
from genbatch.actors.gateways.http.bodies import Refusal
from genbatch.actors.runtime.actor import NOREPLY, From, reply_error
from genbatch.actors.security.curve_keys import KeyStore
from genbatch.actors.security.key_files import TokenFile
from genbatch.actors.security.security import Security
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.service import open_service
from genbatch.nif.context.engine import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.proto.errors import DeadlineExceeded
from genbatch.proto.service_messages import StatsRequest
from tests.actors.gateways.http.serving import ServedHTTP, served_http
from tests.actors.gateways.scripted_batcher import ScriptedBatcher
from tests.waiting import ENGINE_PATIENCE_S

pytestmark = pytest.mark.trio
COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "POLL_S", 0.01)
    monkeypatch.setattr(batch_runner, "RETRY_S", 0.01)


class Slots(ScriptedBatcher):
    """A Batcher with eight sequences, whose counters the test sets."""

    def __init__(self, **stats: int) -> None:
        super().__init__()
        self.stats = {"n_parallel": 8, "requests_waiting": 0, "requests_running": 0, **stats}

    def _answer(self, request: Any) -> Any:
        if isinstance(request, StatsRequest):
            return {**self.stats, "requests_running": self.stats["requests_running"] + len(self.held)}
        return super()._answer(request)


def line(custom_id: str, prompt: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": {"prompt": prompt, **body}}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def upload(client: httpx2.AsyncClient, content: bytes, **headers: str) -> str:
    form = {"files": {"file": ("questions.jsonl", content)}, "data": {"purpose": "batch"}}
    answer = await client.post("/v1/files", **form, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def begin(client: httpx2.AsyncClient, lines: Sequence[Any], **headers: str) -> dict[str, Any]:
    file_id = await upload(client, jsonl(lines), **headers)
    body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    answer = await client.post("/v1/batches", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    assert made["status"] == "validating"
    return made


async def state(client: httpx2.AsyncClient, batch_id: str, **headers: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/v1/batches/{batch_id}", headers=headers)).json()
    return found


async def until(client: httpx2.AsyncClient, batch_id: str, status: str, **headers: str) -> dict[str, Any]:
    while (found := await state(client, batch_id, **headers))["status"] != status:
        assert found["status"] in batch_store.OPEN, found
        await trio.sleep(0.01)
    return found


async def until_answered(client: httpx2.AsyncClient, batch_id: str, count: int) -> None:
    while True:
        if (await state(client, batch_id))["request_counts"]["completed"] >= count:
            return


async def answers(client: httpx2.AsyncClient, file_id: str) -> dict[str, Any]:
    content = (await client.get(f"/v1/files/{file_id}/content")).content
    return {one["custom_id"]: one for one in map(json.loads, content.splitlines())}


async def test_openais_own_client_gets_what_each_request_gets_by_itself(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = EngineOptions(model_path=str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, n_ctx=512)
    doors = ServiceOptions(http=":0", batch_dir=str(tmp_path / "batches"))
    bodies: list[dict[str, Any]] = [
        {"model": "tiny", "messages": [{"role": "user", "content": f"Number {index}"}], "max_tokens": 5 + index}
        | {"temperature": 1, "seed": index}
        for index in range(5)
    ]
    lines = [
        {"custom_id": f"q{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for index, body in enumerate(bodies)
    ]
    with trio.fail_after(ENGINE_PATIENCE_S):
        async with open_service(engine, BatcherOptions(batch_timeout=1.0), doors) as service:
            url = f"{service.addresses[0]}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
                name = (await client.models.list()).data[0].id
                for body in bodies:
                    body["model"] = name
                file = await client.files.create(file=("q.jsonl", jsonl(lines)), purpose="batch")
                assert (file.filename, file.bytes, file.status) == ("q.jsonl", len(jsonl(lines)), "processed")
                batch = await client.batches.create(
                    input_file_id=file.id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                    metadata={"for": "a test"},
                )
                while batch.status != "completed":
                    assert batch.status in ("validating", "in_progress")
                    await trio.sleep(0.05)
                    batch = await client.batches.retrieve(batch.id)
                assert batch.request_counts is not None and batch.metadata == {"for": "a test"}
                assert (batch.request_counts.total, batch.request_counts.completed) == (5, 5)
                assert batch.output_file_id is not None and batch.error_file_id is None
                content = (await client.files.content(batch.output_file_id)).content
                assert [one.id for one in (await client.batches.list(limit=1)).data] == [batch.id]
                found = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, content.splitlines())}
                for index, body in enumerate(bodies):
                    alone = await client.chat.completions.create(**body)
                    choice = found[f"q{index}"]["choices"][0]
                    assert choice["message"]["content"] == alone.choices[0].message.content
                await client.files.delete(file.id)
                with pytest.raises(openai.NotFoundError):
                    await client.files.retrieve(file.id)


async def test_answers_and_errors_go_to_files_of_their_own(tmp_path: Path) -> None:
    async with served_http(batcher=Slots(), batch_dir=tmp_path / "b") as served:
        batch = await begin(served.client, [line("a", "one two"), line("b", "x", temperature=-1), line("c", "three")])
        done = await until(served.client, batch["id"], "completed")
        assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        good, bad = [await answers(served.client, done[name]) for name in ("output_file_id", "error_file_id")]
    assert {name: one["response"]["body"]["choices"][0]["text"] for name, one in good.items()} == {
        "a": "onetwo",
        "c": "three",
    }
    assert bad["b"]["response"]["status_code"] == 400
    assert bad["b"]["response"]["body"]["error"]["param"] == "temperature"


async def test_a_byte_order_mark_is_no_part_of_the_first_request(tmp_path: Path) -> None:
    async with served_http(batcher=Slots(), batch_dir=tmp_path / "b") as served:
        file_id = await upload(served.client, codecs.BOM_UTF8 + jsonl([line("a", "one two")]))
        body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = (await served.client.post("/v1/batches", json=body)).json()
        done = await until(served.client, batch["id"], "completed")
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_live_traffic_goes_first(tmp_path: Path) -> None:
    batcher = Slots(requests_waiting=1)
    async with served_http(batcher=batcher, batch_dir=tmp_path / "b") as served:
        batch = await begin(served.client, [line(f"{index}", f"hold {index}") for index in range(12)])
        for _ in range(30):
            await state(served.client, batch["id"])
        assert not batcher.requests, "a request began while another waited"
        batcher.stats = {"n_parallel": 8, "requests_waiting": 0, "requests_running": 3}
        held = await batcher.arrival("hold 3")
        for _ in range(30):
            await state(served.client, batch["id"])
        assert len(batcher.requests) == 4, "8 sequences, 3 that run, and one that is kept for newcomers"
        assert {message.request.priority for message in batcher.requests} == {100}
        held.emit("x")
        held.finish()
        del batcher.held["hold 3"]
        await batcher.arrival("hold 4")


async def test_a_service_that_starts_again_goes_on_where_it_ended(tmp_path: Path) -> None:
    lines = [line("a", "one"), line("b", "hold b"), line("c", "three"), line("d", "hold d")]
    async with served_http(batcher=Slots(), batch_dir=tmp_path / "b") as served:
        batch = await begin(served.client, lines)
        await served.batcher.arrival("hold b")
        await served.batcher.arrival("hold d")
        await until_answered(served.client, batch["id"], 2)
    found = msgspec.json.decode((tmp_path / "b/batches" / f"{batch['id']}.json").read_bytes(), type=Batch)
    assert found.status == "in_progress" and found.output_file_id is not None
    output = tmp_path / "b/files" / found.output_file_id
    output.write_bytes(output.read_bytes() + b'{"id": "cut sh')  # as a kill leaves it
    again = Slots()
    async with served_http(batcher=again, batch_dir=tmp_path / "b") as served:
        for name in ("b", "d"):
            held = await again.arrival(f"hold {name}")
            held.emit(name)
            held.finish()
        done = await until(served.client, batch["id"], "completed")
        assert done["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        assert sorted(await answers(served.client, done["output_file_id"])) == ["a", "b", "c", "d"]
    assert sorted(message.request.prompt or "" for message in again.requests) == ["hold b", "hold d"]


async def test_a_service_that_takes_over_goes_on_with_the_batches(tmp_path: Path) -> None:
    where = tmp_path / "b"
    async with (
        served_http(batcher=Slots(), batch_dir=where) as old,
        served_http(batcher=Slots(), batch_dir=where, takes_over=True) as new,
    ):
        batch = await begin(old.client, [line("a", "hold a")])
        await old.batcher.arrival("hold a")
        early = await new.client.post("/v1/files", files={"file": ("q", b"{}")}, data={"purpose": "batch"})
        assert early.status_code == 503 and early.headers["retry-after-ms"]
        assert (await state(new.client, batch["id"]))["status"] == "in_progress"
        assert (await new.client.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 503
        old.gateway.retire()
        await old.batcher.release("hold a")
        held = await new.batcher.arrival("hold a")
        held.emit("b")
        held.finish()
        done = await until(new.client, batch["id"], "completed")
        assert (await answers(new.client, done["output_file_id"]))["a"]["response"]["body"]["choices"][0]["text"] == "b"


async def test_a_batch_that_is_cancelled_frees_its_requests_and_keeps_its_answers(tmp_path: Path) -> None:
    async with served_http(batcher=Slots(), batch_dir=tmp_path / "b") as served:
        batch = await begin(served.client, [line("a", "one"), line("b", "hold b")])
        waiting = await begin(served.client, [line("a", "two")])
        await served.batcher.arrival("hold b")
        await until_answered(served.client, batch["id"], 1)
        needed = await served.client.delete(f"/v1/files/{batch['input_file_id']}")
        assert (needed.status_code, needed.json()["error"]["param"]) == (400, "file_id")
        for one in (waiting, batch):
            assert (await served.client.post(f"/v1/batches/{one['id']}/cancel")).json()["status"] in (
                "cancelling",
                "cancelled",
            )
        done = await until(served.client, batch["id"], "cancelled")
        await served.batcher.release("hold b")
        assert sorted(await answers(served.client, done["output_file_id"])) == ["a"]
        again = await served.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert again.status_code == 409
        assert (await until(served.client, waiting["id"], "cancelled"))["output_file_id"] is None
        assert {message.request.prompt for message in served.batcher.requests} == {"one", "hold b"}


async def test_what_is_refused_for_a_while_is_asked_again_and_a_late_queue_is_no_answer(tmp_path: Path) -> None:
    class Late(Slots):
        late = 2

        async def handle_call(self, request: Any, from_: From[Any]) -> Any:
            if isinstance(request, Generate) and request.request.prompt == "late" and self.late:
                self.late -= 1
                reply_error(from_, DeadlineExceeded("the deadline passed"))
                return NOREPLY
            return await super().handle_call(request, from_)

    async with served_http(batcher=Late(), batch_dir=tmp_path / "b") as served:
        batch = await begin(served.client, [line("a", "busy 3 one"), line("b", "late")])
        done = await until(served.client, batch["id"], "completed")
        assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        assert len(served.batcher.requests) == 5


async def test_a_service_that_serves_everyone_alike_is_asked_without_a_priority(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = EngineOptions(model_path=str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, n_ctx=512)
    doors = ServiceOptions(http=":0", batch_dir=str(tmp_path / "b"))
    options = BatcherOptions(batch_timeout=1.0, priority_ageing_s=0)
    with trio.fail_after(ENGINE_PATIENCE_S):
        async with (
            open_service(engine, options, doors) as service,
            httpx2.AsyncClient(base_url=service.addresses[0], trust_env=False, timeout=ENGINE_PATIENCE_S) as client,
        ):
            batch = await begin(client, [line("a", "Hello", max_tokens=3)])
            done = await until(client, batch["id"], "completed")
            assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_a_batch_past_its_window_expires(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "b")
    file = store.add_file("host:127.0.0.1", "q", "batch", jsonl([line("a", "one")]))
    now = int(time.time())
    old = Batch("batch_" + "0" * 24, "x", None, COMPLETIONS, file.id, "24h", now - 100_000, now - 1)
    store.save(old)
    store.close()
    async with served_http(batcher=Slots(), batch_dir=tmp_path / "b") as served:
        served.gateway._batches.wake()  # type: ignore[union-attr]
        path = tmp_path / "b/batches" / f"{old.id}.json"
        while True:
            await trio.sleep(0.01)
            if msgspec.json.decode(path.read_bytes(), type=Batch).status == "expired":
                break


BAD_LINES = {
    "mismatched_endpoint": {**line("a", "x"), "url": "/v1/embeddings"},
    "invalid_method": {**line("a", "x"), "method": "GET"},
    "invalid_request": line("a", "x", stream=True),
    "invalid_json_line": {"custom_id": 7},
    "duplicate_custom_id": line("z", "again"),
}


@pytest.mark.parametrize("full_at", ["the first answer", "the result files"])
async def test_a_full_disk_fails_that_batch_alone_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: str
) -> None:
    """The store's own writes get what the operating system answers on a full disk."""
    write_bytes, append, is_full = Path.write_bytes, BatchStore.append, full_at == "the result files"

    def write_if_room(path: Path, data: bytes) -> int:
        if is_full and path.parent.name in ("files", "batches"):
            write_bytes(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_bytes(path, data)

    def append_if_room(store: BatchStore, file_id: str, data: bytes) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(store, file_id, data)

    monkeypatch.setattr(BatchStore, "append", append_if_room)
    monkeypatch.setattr(Path, "write_bytes", write_if_room)
    batcher = Slots(requests_waiting=1)
    async with served_http(batcher=batcher, batch_dir=tmp_path / "b") as served:
        is_full = False
        batch = await begin(served.client, [line("a", "hold a"), line("b", "hold b")])
        if full_at == "the first answer":
            while (await state(served.client, batch["id"]))["status"] != "in_progress":
                pass
        is_full = True
        batcher.stats["requests_waiting"] = 0
        if full_at == "the first answer":
            (await batcher.arrival("hold a")).finish()
        found = await until(served.client, batch["id"], "failed")
        assert found["status"] == "failed"
        form: Any = {"files": {"file": ("q", b"{}")}, "data": {"purpose": "batch"}}
        refused = await served.client.post("/v1/files", **form)
        assert refused.status_code == 503 and "No space left" in refused.json()["error"]["message"]
        body = {"input_file_id": batch["input_file_id"], "endpoint": COMPLETIONS}
        assert (await served.client.post("/v1/batches", json=body)).status_code == 503
        answer = await served.client.post(COMPLETIONS, json={"prompt": "one two"})
        assert answer.json()["choices"][0]["text"] == "onetwo"
        is_full = False
        again = await begin(served.client, [line("a", "three")])
        done = await until(served.client, again["id"], "completed")
        assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        stored = (tmp_path / "b/batches" / f"{batch['id']}.json").read_bytes()
        assert msgspec.json.decode(stored, type=Batch).status == "failed"  # there is room now
        assert sorted(one.name for one in (tmp_path / "b/files").iterdir() if one.suffix == ".new") == []


async def test_an_answer_that_does_not_fit_on_the_disk_leaves_no_half_line(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "b")
    file = store.add_file("x", "answers", "batch_output", b"one\n")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, limit[1]))
    try:
        with pytest.raises(OSError):
            store.append(file.id, b"three\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    store.append(file.id, b"two\n")
    assert store.path(file.id).read_bytes() == b"one\ntwo\n"
    store.close()


async def test_a_damaged_state_hides_no_other_batch(tmp_path: Path) -> None:
    (tmp_path / "b/batches").mkdir(parents=True, mode=0o700)
    (tmp_path / "b").chmod(0o700)
    (tmp_path / "b/batches" / f"batch_{'0' * 24}.json").write_bytes(b'{"id": "batch_')
    async with served_http(batcher=Slots(), batch_dir=tmp_path / "b") as served:
        batch = await begin(served.client, [line("a", "one")])
        await until(served.client, batch["id"], "completed")
        assert len((await served.client.get("/v1/batches")).json()["data"]) == 1


async def test_faulty_lines_are_named_and_nothing_is_evaluated(tmp_path: Path) -> None:
    async with served_http(batcher=Slots(), batch_dir=tmp_path / "b") as served:
        batch = await begin(served.client, [line("z", "x"), *BAD_LINES.values()])
        found = await state(served.client, batch["id"])
        while found["status"] == "validating":
            found = await state(served.client, batch["id"])
        assert found["status"] == "failed"
        assert [(one["code"], one["line"]) for one in found["errors"]["data"]] == [
            (code, number) for number, code in enumerate(BAD_LINES, 2)
        ]
        empty = await begin(served.client, [])
        while (found := await state(served.client, empty["id"]))["status"] == "validating":
            pass
        assert found["errors"]["data"][0]["code"] == "empty_file"
    assert not served.batcher.requests


async def test_another_owner_sees_nothing(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys")
    alice, bob = ({"authorization": f"Bearer {keys.new_token(name)}"} for name in ("alice", "bob"))
    security = Security(tokens=TokenFile(keys.tokens))
    async with served_http(security, Slots(), batch_dir=tmp_path / "b") as served:
        batch = await begin(served.client, [line("a", "one")], **alice)
        done = await until(served.client, batch["id"], "completed", **alice)
        paths = [f"batches/{batch['id']}", f"files/{done['output_file_id']}", f"files/{done['output_file_id']}/content"]
        for path in paths:
            assert (await served.client.get(f"/v1/{path}", headers=alice)).status_code == 200
            assert (await served.client.get(f"/v1/{path}", headers=bob)).status_code == 404
        for kind in ("files", "batches"):
            assert (await served.client.get(f"/v1/{kind}", headers=bob)).json()["data"] == []
        body = {"input_file_id": batch["input_file_id"], "endpoint": COMPLETIONS}
        assert (await served.client.post("/v1/batches", json=body, headers=bob)).status_code == 404
        assert (await served.client.delete(f"/v1/files/{batch['input_file_id']}", headers=bob)).status_code == 404
        assert served.batcher.requests[0].request.tenant == "alice"


async def refused(served: ServedHTTP, **form: Any) -> tuple[int, Any]:
    answer = await served.client.post("/v1/files", **form)
    return answer.status_code, answer.json()["error"]["param"]


async def test_uploads_that_cannot_be_kept_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served_http(batcher=Slots(), batch_dir=tmp_path / "b") as served:
        file = {"file": ("../../etc/q.jsonl", b"{}")}
        assert await refused(served, files=file, data={"purpose": "fine-tune"}) == (400, "purpose")
        assert await refused(served, files={"other": b"x"}, data={"purpose": "batch"}) == (400, "file")
        assert await refused(served, json={"file": "x"}) == (400, None)
        cut = {"content-type": "multipart/form-data; boundary=x"}
        assert await refused(served, content=b"--x\r\nhalf", headers=cut) == (400, "file")
        assert await refused(served, content=b"--x", headers={"content-type": "multipart/form-data"}) == (400, None)
        kept = await served.client.post("/v1/files", files=file, data={"purpose": "batch"})
        assert kept.json()["filename"] == "q.jsonl"
        monkeypatch.setattr(batch_store, "MAX_STORE_BYTES", 3)
        assert await refused(served, files=file, data={"purpose": "batch"}) == (400, "file")
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("after=none", "after")):
            answer = await served.client.get(f"/v1/files?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        bodies = ({"endpoint": "/v1/models"}, {"endpoint": COMPLETIONS, "completion_window": "1h"})
        for body, param in zip(bodies, ("endpoint", "completion_window"), strict=True):
            answer = await served.client.post("/v1/batches", json={"input_file_id": kept.json()["id"], **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_without_a_directory_the_endpoints_say_how_to_get_one() -> None:
    async with served_http(batcher=Slots()) as served:
        for answer in (await served.client.get("/v1/batches"), await served.client.post("/v1/files")):
            assert answer.status_code == 501 and "--batch-dir" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["../../outside", "file-x", "", "file-" + "0" * 24, "batch_" + "g" * 24])
async def test_an_id_is_no_path(tmp_path: Path, name: str) -> None:
    store = BatchStore(tmp_path / "b")
    (tmp_path / "outside.json").write_bytes(msgspec.json.encode(StoredFile("x", "x", 1, 0, "x", "batch")))
    (tmp_path / "outside").touch()
    with pytest.raises(Refusal, match="there is no"):
        store.file("x", name)
    store.close()


async def test_a_directory_is_for_one_service_and_for_its_user_alone(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "b")
    with pytest.raises(OptionError, match="batch_dir: another service uses"):
        BatchStore(tmp_path / "b")
    store.close()
    BatchStore(tmp_path / "b").close()
    (tmp_path / "b").chmod(0o755)
    with pytest.raises(OptionError, match=r"batch_dir: .* is not a directory of this user alone"):
        BatchStore(tmp_path / "b")
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"batch_dir: .* cannot be made"):
        BatchStore(tmp_path / "file" / "b")
