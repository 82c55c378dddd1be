"""What one streamed request crosses: the files whose functions run, the classes that hold it, the checks of its types.

The request goes through a real service in this process, so that no file of the engine's process is counted.
"""

import json
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
LAYERS = ("actors", "nif", "proto", "clients")
# A temperature that nothing else has: what holds it holds the request's parameters.
MARK = 0.734375


@dataclass
class Trace:
    """What was seen while `runs` was set.

    Args:
        files: of the product, below the root.
        shapes: names of the classes whose instances held the request's temperature, themselves or in a field's object.
        checks: where the request was converted to a type by msgspec, or checked by proto/validation.py.
    """

    files: set[str] = field(default_factory=set)
    shapes: dict[str, None] = field(default_factory=dict)
    checks: list[str] = field(default_factory=list)
    runs: bool = False

    def notice(self, frame: FrameType, event: str, argument: object) -> None:
        """For `sys.setprofile`."""
        if not self.runs or event not in ("call", "return", "c_call") or (file := _product_file(frame)) is None:
            return
        code = frame.f_code
        if event == "call" and code.co_name != "<module>":
            self.files.add(file)
        holders = [holder for value in list(frame.f_locals.values()) if (holder := _holder(value)) is not None]
        self.shapes.update(dict.fromkeys(holders))
        name = getattr(argument, "__name__", "")
        if event == "c_call" and holders and name == "convert":
            self.checks.append(f"{file}: msgspec.convert")
        if event == "call" and holders and file == "proto/validation.py" and code.co_name.startswith("validate_"):
            self.checks.append(f"{file}: {code.co_name}")


@lru_cache
def trace_zeromq_stream() -> Trace:
    """A stream of a ZeroMQ client."""

    async def stream(address: str, trace: Trace) -> None:
        from genbatch.clients import remote

        async with remote.ZeroMQClient(address) as client:
            await client.generate([1, 2, 3], max_tokens=2, ignore_eos=True)  # makes what is made once
            with _running(trace):
                async with client.stream([4, 5, 6], max_tokens=4, temperature=MARK, ignore_eos=True) as tokens:
                    async for _ in tokens:
                        pass

    return _traced(stream, bind="ipc://{}/zeromq.sock")


@lru_cache
def trace_openai_stream() -> Trace:
    """A stream of OpenAI's chat over HTTP; no file of the client is ours."""

    async def stream(address: str, trace: Trace) -> None:
        import httpx2

        body = {"model": "model", "messages": [{"role": "user", "content": "a b c"}], "stream": True, "max_tokens": 4}
        async with httpx2.AsyncClient(base_url=address, trust_env=False, timeout=300) as client:
            await client.post("/v1/chat/completions", json={**body, "stream": False})
            with _running(trace):
                async with client.stream("POST", "/v1/chat/completions", json={**body, "temperature": MARK}) as answer:
                    assert answer.status_code == 200, await answer.aread()
                    assert [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {")]

    return _traced(stream, http=":0")


def _traced(stream: Callable[[str, Trace], Awaitable[None]], **doors: str) -> Trace:
    import trio

    from genbatch.actors.batcher.options import BatcherOptions
    from genbatch.actors.service.options import ServiceOptions
    from genbatch.actors.service.service import open_service
    from genbatch.nif.engine_options import EngineOptions
    from tests.nif.tiny_models import build_model

    trace = Trace()

    async def run(directory: Path) -> None:
        model = build_model("llama", directory / "model")
        engine = EngineOptions(model_path=str(model), dtype="float32", n_gpu_layers=0, n_ctx=1024)
        options = ServiceOptions(**{name: door.format(directory) for name, door in doors.items()})  # type: ignore[arg-type]
        async with open_service(engine, BatcherOptions(n_parallel=2), options) as service:
            await stream(service.addresses[0], trace)

    with tempfile.TemporaryDirectory() as directory:
        threading.setprofile(trace.notice)  # for the model's own thread, which is not there yet
        try:
            trio.run(run, Path(directory))
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
    return trace


@contextmanager
def _running(trace: Trace) -> Any:
    trace.runs = True
    sys.setprofile(trace.notice)
    try:
        yield
    finally:
        sys.setprofile(None)
        trace.runs = False


def _product_file(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename).resolve()  # modules are found through links
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in LAYERS:
        return None
    return str(path.relative_to(ROOT))


def _holder(value: object, depth: int = 4) -> str | None:
    """The class of a value that holds the mark, or holds an object of ours that does; not what holds many in a list."""
    if isinstance(value, bytes | bytearray):
        return "bytes" if str(MARK).encode() in value else None
    if isinstance(value, dict):
        return "dict" if MARK in [each for each in value.values() if isinstance(each, float)] else None
    if not depth or not type(value).__module__.startswith("genbatch."):
        return None
    names = [*getattr(value, "__dict__", ()), *(name for kind in type(value).__mro__ for name in _slots(kind))]
    fields = [getattr(value, name, None) for name in names]
    held = any(each == MARK if isinstance(each, float) else _holder(each, depth - 1) is not None for each in fields)
    return type(value).__name__ if held else None


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__struct_fields__") or kind.__dict__.get("__slots__", ())
    return slots if isinstance(slots, tuple) else ()  # of other classes it is a descriptor
