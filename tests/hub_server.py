"""HubServer: a stand-in for the Hugging Face hub on a loopback port, with the parts of its API that a download uses."""

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf")  # kept in LFS, where a file's name is its SHA-256


class HubServer:
    """Serves one model; a fault can be set for each file.

    Args:
        name: the model's id.
        files: the content of each file.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self.name = name
        self.files = dict(files)
        self.sizes: dict[str, int] = {}  # said instead of the true ones
        self.sent: dict[str, bytes] = {}  # sent instead of the true content
        self.cuts: dict[str, int] = {}  # bytes after which a connection is cut, once
        self.log: list[tuple[str, str, str]] = []  # method, path, range
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def downloads(self, file: str) -> list[str]:
        """The range of each download of a file; "" for all of it."""
        return [span for method, path, span in self.log if method == "GET" and path.endswith(f"{COMMIT}/{file}")]

    def tree(self) -> list[dict[str, Any]]:
        """The list of files."""
        rows = []
        for file, content in self.files.items():
            size = self.sizes.get(file, len(content))
            row: dict[str, Any] = {"type": "file", "path": file, "size": size, "oid": git_hash(content)}
            if file.endswith(LARGE):
                row["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
            rows.append(row)
        return rows

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                hub.log.append((self.command, path, self.headers.get("Range", "")))
                if path.startswith(f"/api/models/{hub.name}/tree/"):
                    self._answer(json.dumps(hub.tree()).encode(), {"Content-Type": "application/json"})
                elif path.startswith(f"/api/models/{hub.name}"):
                    info = {"id": hub.name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in hub.files]}
                    self._answer(json.dumps(info).encode(), {"Content-Type": "application/json"})
                elif path.startswith(f"/{hub.name}/resolve/") and (file := path.rsplit("/", 1)[1]) in hub.files:
                    self._file(file)
                else:
                    self._answer(b"{}", {"X-Error-Code": "RepoNotFound"}, status=404)

            def _file(self, file: str) -> None:
                content = hub.files[file]
                large = file.endswith(LARGE)
                etag = hashlib.sha256(content).hexdigest() if large else git_hash(content)
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
                if large:
                    size = str(hub.sizes.get(file, len(content)))
                    headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": size}
                sent = hub.sent.get(file, content)
                if self.command == "HEAD":
                    headers["Content-Length"] = str(hub.sizes.get(file, len(content)))
                status = 200
                if self.command == "GET" and (span := self.headers.get("Range")):
                    first = int(span.removeprefix("bytes=").partition("-")[0])
                    headers["Content-Range"] = f"bytes {first}-{len(sent) - 1}/{len(sent)}"
                    sent, status = sent[first:], 206
                self._answer(
                    sent, headers, status=status, cut=hub.cuts.pop(file, None) if self.command == "GET" else None
                )

            def _answer(
                self, content: bytes, headers: Mapping[str, str], *, status: int = 200, cut: int | None = None
            ) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content[:cut])
                    self.close_connection = cut is not None

        return Handler


def git_hash(content: bytes) -> str:
    """Git's name of a file."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()
