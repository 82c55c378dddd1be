"""/v1/files and /v1/batches, after OpenAI's."""

import time
from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from genbatch.actors.gateways.http.batch_runner import ENDPOINTS, BatchRunner
from genbatch.actors.gateways.http.batch_store import Batch, StoredFile, new_batch_id
from genbatch.actors.gateways.http.bodies import JSON, Refusal, decode_json
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.validation import check_type

# Seconds in which a batch must end, by OpenAI's name.
WINDOWS = {"24h": 24 * 3600}
MAX_LISTED = 100


class BatchFields(msgspec.Struct, frozen=True):
    """The body of /v1/batches, as OpenAI's.

    Args:
        input_file_id: an uploaded file of requests, one a line.
        endpoint: the endpoint of all these requests, such as /v1/chat/completions.
        completion_window: "24h"; a request without an answer by then gets none.
        metadata: labels that are kept with the batch.
    """

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class BatchEndpoints:
    """The endpoints' functions.

    Args:
        runner: evaluates batches.
    """

    def __init__(self, runner: BatchRunner) -> None:
        self._store = runner.store
        self._runner = runner

    async def upload(self, request: Request) -> Response:
        """Store a file that was sent as a form."""
        form = await _form(request)
        try:
            upload, purpose = form.get("file"), form.get("purpose")
            if not isinstance(upload, UploadFile):
                raise InvalidRequest("file", "must be a file of the form")
            if purpose != "batch":
                raise InvalidRequest("purpose", f'must be "batch", not {str(purpose)[:64]!r}')
            content = await upload.read()
        finally:
            await form.close()
        name = (upload.filename or "file").replace("\\", "/").rpartition("/")[2]
        add = self._store.add_file
        return JSON(_shown_file(await self._store.run(add, _owner(request), name[:256], purpose, content)))

    async def files(self, request: Request) -> Response:
        """Return the caller's files, the newest first."""
        files = await self._store.run(self._store.files, _owner(request))
        return JSON(_page([_shown_file(file) for file in files], request))

    async def file(self, request: Request) -> Response:
        """Describe a file: name, size and purpose."""
        return JSON(_shown_file(await self._store.run(self._store.file, _owner(request), request.path_params["id"])))

    async def content(self, request: Request) -> Response:
        """Return a file's content."""
        stored = await self._store.run(self._store.file, _owner(request), request.path_params["id"])
        content = await self._store.run(self._store.path(stored.id).read_bytes)
        return Response(content, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        """Delete a file that no open batch needs."""
        file_id = request.path_params["id"]
        await self._store.run(self._store.delete_file, _owner(request), file_id)
        return JSON({"id": file_id, "object": "file", "deleted": True})

    async def create(self, request: Request) -> Response:
        """Begin a batch over an uploaded file."""
        fields: BatchFields = check_type(decode_json(request.state.body), BatchFields)
        if fields.endpoint not in ENDPOINTS:
            raise InvalidRequest("endpoint", f"{fields.endpoint[:64]!r} is none of {', '.join(ENDPOINTS)}")
        if fields.completion_window not in WINDOWS:
            raise InvalidRequest("completion_window", f'must be "24h", not {fields.completion_window[:64]!r}')
        self._store.check_ours()
        owner, now = _owner(request), int(time.time())
        await self._store.run(self._store.file, owner, fields.input_file_id)
        batch = Batch(
            id=new_batch_id(),
            owner=owner,
            tenant=request.state.caller.tenant,
            endpoint=fields.endpoint,
            input_file_id=fields.input_file_id,
            completion_window=fields.completion_window,
            created_at=now,
            expires_at=now + WINDOWS[fields.completion_window],
            metadata=fields.metadata,
        )
        await self._store.run(self._store.save, batch)
        self._runner.wake()
        return JSON(_shown_batch(batch))

    async def batches(self, request: Request) -> Response:
        """Return the caller's batches, the newest first."""
        batches = await self._store.run(self._store.batches, _owner(request))
        return JSON(_page([_shown_batch(batch) for batch in batches], request))

    async def batch(self, request: Request) -> Response:
        """Describe a batch."""
        return JSON(_shown_batch(await self._store.run(self._store.batch, _owner(request), request.path_params["id"])))

    async def cancel(self, request: Request) -> Response:
        """End a batch; its answers so far stay."""
        return JSON(_shown_batch(await self._runner.cancel(_owner(request), request.path_params["id"])))


class NoBatches(BatchEndpoints):
    """Stands in for BatchEndpoints without a directory: each endpoint says how to turn batches on."""

    def __init__(self) -> None:
        pass

    async def _refuse(self, request: Request) -> Response:
        raise Refusal(
            HTTPStatus.NOT_IMPLEMENTED, "not_enabled", "files and batches are off: start with --batch-dir DIR"
        )

    upload = files = file = content = delete = create = batches = batch = cancel = _refuse


def _owner(request: Request) -> str:
    owner: str = request.state.caller.owner
    return owner


async def _form(request: Request) -> FormData:
    """Parse the body as a form.

    Raises:
        InvalidRequest: the body is no form.
    """

    async def stream() -> AsyncGenerator[bytes, None]:
        yield request.state.body

    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequest(None, "the body must be multipart/form-data")
    try:
        return await MultiPartParser(request.headers, stream()).parse()
    except (MultiPartException, KeyError) as error:
        raise InvalidRequest(None, f"the body is no form: {error}") from None


def _page(entries: Sequence[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Return a part of a list, by OpenAI's `limit` and `after`.

    Raises:
        InvalidRequest: `limit` is no number, or is too large.
    """
    limit = request.query_params.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED:
        raise InvalidRequest("limit", f"must be a number from 1 to {MAX_LISTED}, not {limit[:16]!r}")
    after = request.query_params.get("after")
    ids = [entry["id"] for entry in entries]
    if after is not None and after not in ids:
        raise InvalidRequest("after", f"there is no {after[:64]!r}")
    rest = entries[0 if after is None else ids.index(after) + 1 :]
    shown = rest[: int(limit)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": len(rest) > len(shown)}


def _shown_file(file: StoredFile) -> dict[str, Any]:
    shown = {"id": file.id, "object": "file", "bytes": file.bytes, "created_at": file.created_at}
    return {**shown, "filename": file.filename, "purpose": file.purpose, "status": "processed"}


def _shown_batch(batch: Batch) -> dict[str, Any]:
    ends = {
        f"{status}_at": batch.ended_at if batch.status == status else None
        for status in ("completed", "failed", "expired", "cancelled")
    }
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": None,
        "cancelling_at": batch.cancelling_at,
        **ends,
        "request_counts": {
            "total": batch.counts.total,
            "completed": batch.counts.completed,
            "failed": batch.counts.failed,
        },
        "metadata": batch.metadata,
    }
