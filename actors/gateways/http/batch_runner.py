"""BatchRunner: evaluates the requests of stored batches where live traffic leaves room.

It runs one batch at a time, the oldest first. The requests go through the same endpoints as those of the network,
without a socket (`post`). They have the lowest priority. They run only while no request waits, and leave one slot free
for new requests.
"""

import json
import logging
import time
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
import trio
from starlette.types import ASGIApp

from genbatch.actors.gateways.http.batch_store import OPEN, Batch, BatchStore, Status
from genbatch.actors.gateways.http.bodies import Refusal
from genbatch.actors.gateways.http.service_calls import OURSELVES, HTTPCaller, HTTPCalls
from genbatch.proto.errors import GenbatchError
from genbatch.proto.validation import MAX_PRIORITY

logger = logging.getLogger(__name__)


async def post(app: ASGIApp, path: str, body: bytes, state: dict[str, Any]) -> tuple[int, bytes]:
    """Return the status and the body of the application's answer to a POST.

    Args:
        path: the path of the endpoint.
        body: JSON.
        state: the state of the ASGI scope.
    """
    received = [{"type": "http.request", "body": body, "more_body": False}]
    status, answer = 0, bytearray()

    async def receive() -> Any:
        if not received:
            await trio.sleep_forever()  # this client never disconnects
        return received.pop()

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            answer.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "state": state,
    }
    await app(scope, receive, send)
    return status, bytes(answer)


# The endpoints that a batch may name.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
# Seconds between two checks for free slots.
POLL_S = 0.2
# Seconds after which a request that was refused for a passing reason is sent again.
RETRY_S = 1.0
# The most faulty lines that a batch names.
MAX_ERRORS = 100
_PASSING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch file; unknown fields are ignored, as OpenAI's own reader does."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class LineFault(NamedTuple):
    """The reason for not evaluating a line, in OpenAI's names."""

    code: str
    message: str
    param: str | None = None


def fault_of(line: BatchLine, urls: Sequence[str]) -> LineFault | None:
    """Return the fault of a line by itself; None for none.

    Args:
        urls: the endpoints that the line may name.
    """
    if line.method != "POST":
        return LineFault("invalid_method", f"{line.method[:16]!r} is not POST", "method")
    if line.url not in urls:
        return LineFault("mismatched_endpoint", f"{line.url[:64]!r} is none of {', '.join(urls)}", "url")
    if line.body.get("stream"):
        return LineFault("invalid_request", "answers in a batch file cannot be streamed", "body.stream")
    return None


class BatchRunner:
    """Evaluates batches; `run` is a task of the gateway.

    Args:
        store: keeps the batches.
        calls: call the service for its free slots.

    Attributes:
        app: the endpoints without access control; set it before `run`.
    """

    app: ASGIApp

    def __init__(self, store: BatchStore, calls: HTTPCalls) -> None:
        self.store = store
        self._calls = calls
        self._changed = trio.Event()
        self._choosing = trio.Lock()
        self._running: tuple[Batch, trio.CancelScope] | None = None
        self._has_priorities = True
        self._scope = trio.CancelScope()

    def stop(self) -> None:
        """Stop evaluating, and unlock the directory; open batches stay open for the next service."""
        self._scope.cancel()
        self.store.close()

    def wake(self) -> None:
        """Look for a new batch."""
        self._changed.set()

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Cancel a batch and its running requests; return its state.

        Raises:
            Refusal: there is no such batch, or it has ended.
            Unavailable: another service has the batches, or the disk is full.
        """
        self.store.check_ours()
        async with self._choosing:
            batch = await self.store.run(self.store.batch, owner, batch_id)
            running = self._running
            if running is not None and running[0].id == batch_id:
                batch, scope = running
            if batch.status not in OPEN:
                raise Refusal(HTTPStatus.CONFLICT, "conflict", f"the batch is {batch.status} already")
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            if running is not None and batch is running[0]:
                scope.cancel()
            else:
                await self._end(batch, "cancelled")
        return batch

    async def run(self) -> None:
        """Evaluate stored and new batches until `stop`."""
        with self._scope:
            while not self.store.acquire():  # noqa: ASYNC110 - a file lock gives no notice when it becomes free
                await trio.sleep(POLL_S)
            await self._run_all()

    async def _run_all(self) -> None:
        while True:
            self._changed = trio.Event()
            try:
                if not await self._run_next():
                    await self._changed.wait()
            except GenbatchError:
                logger.exception("the batches cannot be read")
                await trio.sleep(RETRY_S)

    async def _run_next(self) -> bool:
        """Run the oldest open batch to its end; return False without one.

        If the service stops, the batch stays open for the next start.
        """
        scope = trio.CancelScope()
        async with self._choosing:
            batches = await self.store.run(self.store.open_batches)
            if not batches:
                return False
            batch = batches[0]
            self._running = (batch, scope)
        try:
            await self._end(batch, await self._status_after(batch, scope))
        # guard: a batch that fails, such as on a full disk
        except Exception:
            logger.exception("batch %s failed", batch.id)
            await self._end(batch, "failed")
        finally:
            self._running = None
        return True

    async def _status_after(self, batch: Batch, scope: trio.CancelScope) -> Status:
        """Evaluate a batch within a scope; return the status with which it ends."""
        if batch.status == "cancelling":
            return "cancelled"
        with scope:
            scope.deadline = trio.current_time() + batch.expires_at - time.time()
            if batch.status != "in_progress" and not await self._begin(batch):
                return "failed"
            await _Evaluation(self, self.store, batch).run()
        if scope.cancelled_caught:
            return "cancelled" if batch.cancelling_at is not None else "expired"
        return "completed"

    async def _begin(self, batch: Batch) -> bool:
        """Check every line; return whether the batch can be evaluated."""
        lines, errors = await self.store.run(read_lines, self.store, batch)
        if errors:
            batch.errors = errors[:MAX_ERRORS]
            return False
        batch.counts.total = len(lines)
        batch.output_file_id = await self.store.run(self.store.result_file, batch, "output")
        batch.error_file_id = await self.store.run(self.store.result_file, batch, "errors")
        batch.status, batch.in_progress_at = "in_progress", int(time.time())
        await self.store.run(self.store.save, batch)
        return True

    async def _end(self, batch: Batch, status: Status) -> None:
        batch.status, batch.ended_at = status, int(time.time())
        await self.store.run(self.store.end, batch)

    async def room(self) -> int:
        """Return how many requests may begin now."""
        try:
            stats = await self._calls.stats(OURSELVES)
        except GenbatchError:
            return 0  # the engine is being restarted
        slots = int(stats.get("n_parallel", 1))
        if stats.get("requests_waiting", 0):
            return 0
        return max(1, slots - 1) - int(stats.get("requests_running", 0))

    async def answer(self, batch: Batch, line: BatchLine, request_id: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of the endpoint's answer to a line."""
        caller = HTTPCaller(f"batch:{batch.owner}", batch.tenant, request_id)
        while True:
            adds_priority = self._has_priorities and "priority" not in line.body
            body = json.dumps({"priority": MAX_PRIORITY, **line.body} if adds_priority else line.body).encode()
            status, content = await post(self.app, line.url, body, {"caller": caller, "body": body})
            answer: dict[str, Any] = json.loads(content)
            if status == HTTPStatus.BAD_REQUEST and adds_priority and answer["error"].get("param") == "priority":
                self._has_priorities = False  # priorities are off in this service
            elif status in _PASSING or (status == HTTPStatus.GATEWAY_TIMEOUT and "deadline_s" not in line.body):
                await trio.sleep(RETRY_S)  # the default deadline does not end a line of a batch
            else:
                return status, answer


class _Evaluation:
    """The open requests of one batch."""

    def __init__(self, runner: BatchRunner, store: BatchStore, batch: Batch) -> None:
        self._runner = runner
        self._store = store
        self._batch = batch

    async def run(self) -> None:
        """Evaluate every line that has no answer yet."""
        todo = await self._store.run(self._todo)
        async with trio.open_nursery() as nursery:
            while True:
                for _ in range(await self._runner.room()):
                    number, line = next(todo, (0, None))
                    if line is None:
                        return
                    nursery.start_soon(self._evaluate, number, line)
                await trio.sleep(POLL_S)

    def _todo(self) -> Iterator[tuple[int, BatchLine]]:
        lines, _ = read_lines(self._store, self._batch)
        counts = self._batch.counts
        answered, failed = (self._read_answers(file_id) for file_id in self._result_files())
        counts.completed, counts.failed = len(answered), len(failed)
        done = answered | failed
        return iter([(number, line) for number, line in lines if line.custom_id not in done])

    def _result_files(self) -> tuple[str, str]:
        batch = self._batch
        assert batch.output_file_id is not None and batch.error_file_id is not None
        return batch.output_file_id, batch.error_file_id

    def _read_answers(self, file_id: str) -> set[str]:
        """Return the lines that an earlier run answered; remove a last line that a kill has cut short."""
        path = self._store.path(file_id)
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            path.write_bytes(whole)
        return {json.loads(line)["custom_id"] for line in whole.split(b"\n") if line}

    async def _evaluate(self, number: int, line: BatchLine) -> None:
        batch, name = self._batch, f"{self._batch.id}_{number}"
        status, body = await self._runner.answer(batch, line, name)
        is_answer = status == HTTPStatus.OK
        response = {"status_code": status, "request_id": name, "body": body}
        entry = {"id": name, "custom_id": line.custom_id, "response": response, "error": None}
        output, errors = self._result_files()
        await self._store.run(self._keep, output if is_answer else errors, msgspec.json.encode(entry) + b"\n")

    def _keep(self, file_id: str, entry: bytes) -> None:
        """Append an answer, and count it."""
        self._store.append(file_id, entry)
        counts = self._batch.counts
        if file_id == self._batch.output_file_id:
            counts.completed += 1
        else:
            counts.failed += 1
        self._store.save(self._batch)


def read_lines(store: BatchStore, batch: Batch) -> tuple[list[tuple[int, BatchLine]], list[dict[str, Any]]]:
    """Return a batch's requests with their line numbers, from 1, and the faults of the other lines."""
    lines: list[tuple[int, BatchLine]] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    content = store.path(batch.input_file_id).read_bytes().removeprefix(BOM_UTF8)
    for number, data in enumerate(content.split(b"\n"), 1):
        if not data.strip():
            continue
        try:
            line = msgspec.json.decode(data, type=BatchLine)
            fault = fault_of(line, [batch.endpoint])
            if line.custom_id in seen:
                fault = LineFault("duplicate_custom_id", f"{line.custom_id[:64]!r} is used twice", "custom_id")
        except (msgspec.DecodeError, RecursionError) as error:
            fault = LineFault("invalid_json_line", str(error) or "nested too deeply")
        if fault is None:
            seen.add(line.custom_id)
            lines.append((number, line))
        else:
            errors.append({**fault._asdict(), "line": number})
    if not lines and not errors:
        errors.append({"code": "empty_file", "message": "the file has no requests", "param": None, "line": None})
    return lines, errors
