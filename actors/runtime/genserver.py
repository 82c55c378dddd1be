"""GenServer: an actor whose state only its own task touches, after Elixir's.

    class Counter(GenServer):
        async def init(self) -> None:
            self.count = 0

        async def handle_call(self, request, from_):
            return self.count

        async def handle_cast(self, message):
            self.count += message

    async with trio.open_nursery() as nursery:
        counter = await start(nursery, Counter(), name="counter")
        counter.cast(2)
        assert await counter.call("value") == 2
        await counter.stop()

Messages are handled one at a time, control messages (`Down`, timers, `control=True`) first. An exception in a
callback ends the actor: its open calls get `ActorDown` with the exception as cause, monitors fire, and the
exception goes to whoever runs the actor, a supervisor or the nursery.
"""

import enum
import traceback
from collections import deque
from typing import Any, Final, Literal

import trio

from genbatch.actors.runtime.mailbox import Cast, Info, Mailbox, Stop, Timer
from genbatch.actors.runtime.monitor import Down, Exit, Monitor, Reason
from genbatch.actors.runtime.ref import ActorRef, From, reply, reply_error
from genbatch.actors.runtime.telemetry import Telemetry

__all__ = [
    "NOREPLY",
    "ActorRef",
    "Down",
    "Exit",
    "From",
    "GenServer",
    "Monitor",
    "Reason",
    "Timer",
    "reply",
    "reply_error",
    "run_actor",
    "start",
]

MESSAGES_PER_TURN = 16  # then other tasks get a turn, even if the mailbox never empties: a trio schedule costs ~5 us


class NoReply(enum.Enum):
    """The type of NOREPLY."""

    NOREPLY = "noreply"


NOREPLY: Final[Literal[NoReply.NOREPLY]] = NoReply.NOREPLY


class GenServer:
    """Subclass it and override callbacks. A subclass may define `__init__` and need not call this class's."""

    ref: ActorRef  # this actor's, from `init` on
    telemetry: Telemetry  # for the actor's own events

    # Callbacks.

    async def init(self) -> None:
        """Runs before any message; `start` returns after it. If it raises, the actor did not start."""

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        """Returns the reply, or NOREPLY to `reply(from_, value)` or `reply_error(from_, error)` later."""
        raise NotImplementedError(f"{type(self).__name__} handles no call: {request!r}")

    async def handle_cast(self, message: Any) -> None:
        """Handles what `ActorRef.cast` sent."""
        raise NotImplementedError(f"{type(self).__name__} handles no cast: {message!r}")

    async def handle_info(self, message: Any) -> None:
        """Handles everything else: `Down`, timers, what `ActorRef.info` sent."""
        metadata = {"name": self.ref.name, "message": message}
        self.telemetry.execute("actor.unhandled_info", {}, metadata)

    async def handle_continue(self, argument: Any) -> None:
        """Handles what `continue_with` deferred."""
        raise NotImplementedError(f"{type(self).__name__} handles no continue: {argument!r}")

    async def terminate(self, reason: Reason) -> None:
        """Runs once, last, if `init` succeeded, however the actor ends.

        New messages are refused already; open calls can still be replied to. It is shielded from
        cancellation, for at most the actor's shutdown time.
        """

    # What callbacks use.

    def continue_with(self, argument: object) -> None:
        """Runs `handle_continue(argument)` after this callback, before the next message."""
        self._continues.append(argument)

    def send_after(self, delay_s: float, message: object) -> Timer:
        """Sends `message` to `handle_info` in `delay_s` seconds, on the control lane."""
        return self._mailbox.put_after(delay_s, message)

    def monitor(self, target: From[Any] | ActorRef) -> Monitor:
        """Asks for one `Down` when a caller stops waiting or an actor ends; at once if it already has.

        Raises:
            ActorDown: `target` is a registry's ref and no actor has the name now.
        """
        return Monitor(target, target if isinstance(target, From) else target.lifetime, self._mailbox)

    def stop(self, reason: Reason = Exit.NORMAL) -> None:
        """Ends the actor after this callback; an exception as the reason counts as a crash."""
        if self._stop_reason is None:
            self._stop_reason = reason

    # The loop.

    _mailbox: Mailbox
    _continues: deque[object]
    _stop_reason: Reason | None

    def _attach(self, mailbox: Mailbox) -> None:
        """Makes the actor ready for `init`."""
        self.ref = ActorRef(mailbox.name, lambda: mailbox)
        self.telemetry = mailbox.telemetry
        self._mailbox = mailbox
        self._continues = deque()
        self._stop_reason = None
        mailbox.owner = trio.lowlevel.current_task()

    async def _serve(self) -> Reason:
        """Handles messages until told to stop; returns why."""
        handled = 0
        while self._stop_reason is None:
            if self._continues:
                await self.handle_continue(self._continues.popleft())
            else:
                envelope = await self._mailbox.get()
                await (self._observe(envelope) if self.telemetry.attached else self._handle(envelope))
            handled += 1
            if handled % MESSAGES_PER_TURN == 0:
                await trio.lowlevel.checkpoint()
        return self._stop_reason

    async def _observe(self, envelope: object) -> None:
        started = trio.current_time()
        await self._handle(envelope)
        measurements = {"duration_s": trio.current_time() - started, "waiting": len(self._mailbox)}
        metadata = {"name": self.ref.name, "kind": type(envelope).__name__}
        self.telemetry.execute("actor.message", measurements, metadata)

    async def _handle(self, envelope: object) -> None:
        if isinstance(envelope, From):
            value = await self.handle_call(envelope.request, envelope)
            if value is not NOREPLY:
                reply(envelope, value)
        elif isinstance(envelope, Cast):
            await self.handle_cast(envelope.message)
        elif isinstance(envelope, Info | Timer):
            await self.handle_info(envelope.message)
        elif isinstance(envelope, Down):
            await self.handle_info(envelope)
        else:
            assert isinstance(envelope, Stop), envelope
            self.stop(envelope.reason)


async def start(
    nursery: trio.Nursery,
    actor: GenServer,
    *,
    name: str | None = None,
    mailbox_size: int = 1024,
    shutdown_s: float = 5.0,
    telemetry: Telemetry | None = None,
) -> ActorRef:
    """Runs `actor` in `nursery` and returns its ref once `init` is done.

    An exception that ends the actor is raised in the nursery, as any task's is.

    Args:
        name: for errors and telemetry; the class's name if None.
        mailbox_size: most messages waiting on the normal lane.
        shutdown_s: seconds that `terminate` may take.

    Raises:
        Exception: what `init` raised.
    """

    async def run(task_status: trio.TaskStatus[ActorRef]) -> None:
        await run_actor(
            actor,
            name=name or type(actor).__name__,
            mailbox_size=mailbox_size,
            shutdown_s=shutdown_s,
            telemetry=telemetry or Telemetry(),
            task_status=task_status,
        )

    ref: ActorRef = await nursery.start(run)
    return ref


async def run_actor(
    actor: GenServer,
    *,
    name: str,
    mailbox_size: int,
    shutdown_s: float,
    telemetry: Telemetry,
    task_status: trio.TaskStatus[ActorRef],
) -> None:
    """Lives the actor's whole life in the current task; raises what ended it, unless that was an `Exit`."""
    mailbox = Mailbox(name, mailbox_size, telemetry)
    actor._attach(mailbox)
    started = trio.current_time()
    reason: Reason = Exit.NORMAL
    try:
        await actor.init()
    except BaseException as error:
        reason = _reason(error)
        mailbox.close(reason)
        mailbox.end(reason)
        raise
    telemetry.execute("actor.start", {}, {"name": name})
    try:
        task_status.started(actor.ref)
        reason = await actor._serve()
        if isinstance(reason, BaseException):
            raise reason
    except BaseException as error:
        reason = _reason(error)
        raise
    finally:
        mailbox.close(reason)
        try:
            await _terminate(actor, reason, shutdown_s)
        finally:
            mailbox.end(reason)
            measurements = {"duration_s": trio.current_time() - started}
            telemetry.execute("actor.stop", measurements, {"name": name, "reason": reason})


async def _terminate(actor: GenServer, reason: Reason, shutdown_s: float) -> None:
    """Runs the callback; its own failure must not hide an earlier one."""
    name, telemetry = actor.ref.name, actor.telemetry
    with trio.move_on_after(shutdown_s, shield=True) as scope:
        try:
            await actor.terminate(reason)
        except Exception as error:
            telemetry.execute("actor.terminate_failed", {}, {"name": name, "error": error})
            if not isinstance(reason, BaseException):
                raise
            reason.add_note("terminate failed too: " + traceback.format_exception_only(error)[-1].strip())
    if scope.cancelled_caught:
        telemetry.execute("actor.terminate_overdue", {"shutdown_s": shutdown_s}, {"name": name})


def _reason(error: BaseException) -> Reason:
    """Why the actor ended; a cancellation may come wrapped in groups by the nurseries of a callback."""
    if isinstance(error, BaseExceptionGroup):
        rest = error.split(trio.Cancelled)[1]
        return Exit.CANCELLED if rest is None else error
    return Exit.CANCELLED if isinstance(error, trio.Cancelled) else error
