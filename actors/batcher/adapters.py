"""AdapterCalls: adapters that the operator loads and drops while requests run.

load      read on a thread of its own, then made ready beside the steps: nobody waits for it but its caller
unload    new requests are refused at once; accepted ones go on to their end, or to `timeout_s`; then the prompts held
          with it are let go between two steps, and its memory with them
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import outcome

from genbatch.actors.batcher.messages import LoadAdapter, UnloadAdapter
from genbatch.actors.batcher.open_requests import OpenRequests
from genbatch.actors.batcher.requests import Request
from genbatch.actors.batcher.slots import HeldPrompts, Slots
from genbatch.actors.runtime.actor import From, Timer, reply, reply_error
from genbatch.actors.runtime.worker import Worker
from genbatch.nif.context import Context
from genbatch.nif.errors import AdapterError
from genbatch.nif.lora import LoraAdapter
from genbatch.proto.errors import EngineError, GenbatchError, InvalidRequest, ModelNotFound, Unavailable
from genbatch.proto.messages import Drained
from genbatch.proto.validation import validate_load_adapter, validate_unload_adapter


@dataclass(frozen=True, slots=True)
class AdapterReady:
    """An adapter was read and packed, or could not be."""

    name: str
    adapter: "outcome.Outcome[LoraAdapter]"


@dataclass(frozen=True, slots=True)
class UnloadOver:
    """The time that an adapter's requests had to end in is over."""

    name: str


@dataclass(slots=True)
class _Unloading:
    """An adapter on its way out."""

    adapter: LoraAdapter
    callers: "list[From[Any]]"
    timer: Timer
    cancelled: int = 0


@dataclass(slots=True)
class AdapterCalls:
    """See the module's docstring; used on the event loop.

    Args:
        ctx: whose adapters.
        slots, held, requests: what may be evaluated with one.
        open_worker: makes the thread that reads; it is made when it is first needed.
        send: brings AdapterReady back to the actor that owns this.
        send_after: brings UnloadOver, in so many seconds.
        on_change: called when there is another adapter, or one less.
    """

    ctx: Context
    slots: Slots
    held: HeldPrompts
    requests: OpenRequests
    open_worker: Callable[[str], Worker]
    send: Callable[[AdapterReady], None]
    send_after: Callable[[float, UnloadOver], Timer]
    on_change: Callable[[], None]
    _loading: "dict[str, From[Any]]" = field(default_factory=dict)
    _unloading: dict[str, _Unloading] = field(default_factory=dict)
    _worker: Worker | None = None

    # Loading

    def load(self, message: LoadAdapter, from_: "From[Any]") -> None:
        """Begins to read; the caller is answered by `ready`."""
        wanted = message.request
        try:
            validate_load_adapter(wanted)
            if wanted.name in self._loading:
                raise InvalidRequest("name", f"an adapter {wanted.name!r} is being loaded")
            self.ctx.adapters.check(wanted.name)
        except (GenbatchError, AdapterError) as error:
            reply_error(from_, _to_error(error))
            return
        self._loading[wanted.name] = from_
        if self._worker is None:
            self._worker = self.open_worker("genbatch-adapters")
        self._worker.submit(
            self._read,
            wanted.name,
            Path(wanted.path),
            on_done=lambda adapter: self.send(AdapterReady(wanted.name, adapter)),
        )

    def ready(self, message: AdapterReady) -> "From[Any] | None":
        """Serves it; whom to answer that it is served, None where the caller was told why not."""
        from_ = self._loading.pop(message.name)
        try:
            self.ctx.add_adapter(message.adapter.unwrap())
        except Exception as error:  # also of a runner that has no memory for it
            reply_error(from_, _to_error(error))
            return None
        self.on_change()
        return from_

    def _read(self, name: str, path: Path) -> LoraAdapter:
        adapter = self.ctx.adapters.read(name, path)
        self.ctx.prepare_adapter(adapter)
        return adapter

    # Unloading

    def unload(self, message: UnloadAdapter, from_: "From[Any]") -> None:
        """Refuses new requests for it; the caller is answered by `settle`."""
        wanted = message.request
        try:
            validate_unload_adapter(wanted)
            if wanted.name not in self.ctx.adapters:
                loaded = ", ".join(self.ctx.adapters) or "none"
                raise ModelNotFound(f"no adapter {wanted.name[:128]!r} is loaded; there is {loaded}", field="name")
        except GenbatchError as error:
            reply_error(from_, error)
            return
        going = self._unloading.get(wanted.name)
        timer = self.send_after(wanted.timeout_s, UnloadOver(wanted.name))
        if going is not None:  # whoever has less patience is heard
            going.callers.append(from_)
            if timer.deadline < going.timer.deadline:
                timer, going.timer = going.timer, timer
            timer.cancel()
            return
        self._unloading[wanted.name] = _Unloading(self.ctx.adapters[wanted.name], [from_], timer)
        self.ctx.adapters.retire(wanted.name)
        self.on_change()

    def over(self, message: UnloadOver) -> None:
        """Has its requests cancelled, where some are still open."""
        going = self._unloading.get(message.name)
        for request in self._with(going.adapter) if going is not None else ():
            if request.abandoned is None:
                request.abandoned = "cancelled"
                assert going is not None
                going.cancelled += 1

    def settle(self) -> bool:
        """Between two steps: gives back what nobody uses any more; whether a held prompt was let go."""
        let_go = False
        for name, going in list(self._unloading.items()):
            if self._with(going.adapter):
                continue
            for held in [held for held in self.held if held.adapter is going.adapter]:
                self.slots.drop_held(held)
                let_go = True
            self.ctx.drop_adapter(going.adapter)
            going.timer.cancel()
            del self._unloading[name]
            for from_ in going.callers:
                reply(from_, Drained(num_cancelled=going.cancelled))
        return let_go

    async def close(self) -> None:
        """Answers every caller; the actor stops."""
        callers = [*self._loading.values(), *(from_ for going in self._unloading.values() for from_ in going.callers)]
        for from_ in callers:
            reply_error(from_, Unavailable("the batcher has stopped"))
        self._loading.clear()
        self._unloading.clear()
        if self._worker is not None:
            await self._worker.close()

    def _with(self, adapter: LoraAdapter) -> list[Request]:
        return [request for request in self.requests if request.adapter is adapter]


def _to_error(error: Exception) -> GenbatchError:
    if isinstance(error, AdapterError):
        return InvalidRequest("path", str(error))
    return error if isinstance(error, GenbatchError) else EngineError(f"loading it failed: {error}")
