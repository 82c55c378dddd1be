"""GenServer: an actor with state that only its own task touches, after Elixir's GenServer.

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
exception goes to the supervisor or the nursery that runs the actor.

    caller -- ref.call --> Mailbox -- handle_call(request, From) --> reply --> caller
                              ^                                 |
                              +-- Down, if the caller is gone --+ monitor

A monitor tells one actor, once, that a caller or another actor has ended:

    monitor = self.monitor(from_)         # in handle_call, before returning NOREPLY
    ...
    async def handle_info(self, message):
        if isinstance(message, Down):     # message.monitor is monitor, message.target is from_
            ...                           # the caller was cancelled or timed out: free what it holds

A monitor is removed when it fires, when the call is answered, and when either side ends; `cancel` removes it earlier.

A mailbox has two lanes. The normal lane is bounded: a message that does not fit is refused, never dropped. The
control lane is served first and accepts messages while the normal lane is full. It has no limit of its own, because
its messages are bounded elsewhere: a `Down` for each monitor and a timer for each `send_after` of the actor itself, a
control call or a stop for each waiting task. A sender of control casts and infos must likewise bound their number.
"""

import enum
import traceback
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import outcome
import trio

from genbatch.actors.runtime.errors import ActorDown, ActorError, CallTimeout, MailboxFull
from genbatch.actors.runtime.sleeper import Sleeper
from genbatch.actors.runtime.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import MutableSequence


class Exit(enum.Enum):
    """The reason for which an actor or a caller ended without an exception."""

    NORMAL = "normal"
    SHUTDOWN = "shutdown"  # its supervisor stopped it
    CANCELLED = "cancelled"  # its cancel scope was cancelled
    TIMEOUT = "timeout"  # the caller's timeout passed


Reason = Exit | BaseException


class Monitor:
    """One actor's watch over one target."""

    __slots__ = ("_down", "_lifetime", "_mailbox", "target")

    def __init__(self, target: "From[Any] | ActorRef", lifetime: "Lifetime", mailbox: "Mailbox") -> None:
        self.target = target
        self._lifetime = lifetime
        self._mailbox = mailbox  # of the watching actor
        self._down: Down | None = None
        mailbox.monitors[self] = None
        if lifetime.reason is None:
            lifetime.watchers[self] = None
        else:
            self.fire(lifetime.reason)

    def cancel(self) -> None:
        """Stop watching. Even a `Down` that is already in the mailbox is not handled any more."""
        self.release()
        if self._down is not None:
            self._mailbox.discard(self._down)

    def fire(self, reason: Reason) -> None:
        """Put `Down` on the watching actor's control lane."""
        self.release()
        self._down = Down(self, self.target, reason)
        self._mailbox.put(self._down, control=True)

    def release(self) -> None:
        """Remove the monitor on both sides."""
        self._lifetime.watchers.pop(self, None)
        self._mailbox.monitors.pop(self, None)


@dataclass(frozen=True, slots=True, eq=False)
class Down:
    """The message to `handle_info` when a monitored target has ended."""

    monitor: Monitor
    target: "From[Any] | ActorRef"
    reason: Reason


class Lifetime:
    """An object that can be monitored: it ends once, with a reason."""

    __slots__ = ("reason", "watchers")

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self.watchers: dict[Monitor, None] = {}  # a dict, for its order

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.reason is None

    def end(self, reason: Reason) -> None:
        """End it and fire every monitor."""
        assert self.reason is None
        self.reason = reason
        for monitor in tuple(self.watchers):
            monitor.fire(reason)


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """A message for `handle_cast`."""

    message: object


@dataclass(frozen=True, slots=True, eq=False)
class Info:
    """A message for `handle_info`."""

    message: object


@dataclass(frozen=True, slots=True, eq=False)
class Stop:
    """The message that ends the actor after its current message."""

    reason: Reason


@dataclass(frozen=True, slots=True, eq=False)
class Timer:
    """A message for `handle_info` at `deadline` (seconds on the event loop's clock)."""

    mailbox: "Mailbox"
    message: object
    deadline: float

    def cancel(self) -> None:
        """Take the message back, even if it is due already; a handled message is no error."""
        self.mailbox.discard(self)


class Mailbox(Lifetime):
    """Bounded mailbox of one actor; its lifetime is the actor's."""

    __slots__ = (
        "_control",
        "_normal",
        "_reader",
        "_timers",
        "calls",
        "closed",
        "ended",
        "max_size",
        "monitors",
        "name",
        "owner",
        "telemetry",
    )

    def __init__(self, name: str, max_size: int, telemetry: Telemetry) -> None:
        super().__init__()
        assert max_size > 0, max_size
        self.name = name
        self.max_size = max_size
        self.telemetry = telemetry
        self.owner: trio.lowlevel.Task | None = None
        self.calls: dict[From[Any], object] = {}  # the requests that are not answered
        self.monitors: dict[Monitor, None] = {}  # the actor's own monitors
        self.closed: Reason | None = None
        self.ended = trio.Event()
        self._normal: deque[object] = deque()
        self._control: deque[object] = deque()
        self._timers: list[Timer] = []  # by deadline
        self._reader = Sleeper()  # the actor, in `get`

    def __len__(self) -> int:
        return len(self._normal) + len(self._control)

    def put(self, envelope: object, *, control: bool = False) -> None:
        """Add a message at the end of a lane.

        Raises:
            ActorDown: the actor ended or is ending.
            MailboxFull: the normal lane is full.
        """
        if self.closed is not None:
            raise ActorDown(self.name, self.closed)
        if control:
            self._control.append(envelope)
        # guard: bound of a mailbox
        elif len(self._normal) < self.max_size:
            self._normal.append(envelope)
        else:
            self.telemetry.execute("actor.mailbox_full", {"max_size": self.max_size}, {"name": self.name})
            raise MailboxFull(self.name, self.max_size)
        self._reader.wake()

    def put_after(self, delay_s: float, message: object) -> Timer:
        """Put `message` on the control lane `delay_s` seconds from now."""
        assert delay_s >= 0, delay_s
        timer = Timer(self, message, trio.current_time() + delay_s)
        if self.closed is None:
            insort(self._timers, timer, key=attrgetter("deadline"))
            self._reader.wake()
        return timer

    async def get(self) -> object:
        """Return the next message, and wait for one if there is none; only for the actor's own task."""
        while True:
            if self._timers:
                self._move_due_timers()
            if self._control:
                return self._control.popleft()
            if self._normal:
                return self._normal.popleft()
            if self._timers:
                with trio.CancelScope(deadline=self._timers[0].deadline):
                    await self._reader
            else:  # without a cancel scope, which costs as much as the rest of this method
                await self._reader

    def discard(self, envelope: object) -> None:
        """Remove a message; a missing message is no error."""
        lanes: tuple[MutableSequence[Any], ...] = (self._timers, self._control, self._normal)
        for lane in lanes:
            if envelope in lane:
                lane.remove(envelope)

    def close(self, reason: Reason) -> None:
        """Refuse messages from now on, and remove timers and monitors; open calls stay open until `end`."""
        self.closed = reason
        self._timers.clear()
        for monitor in tuple(self.monitors):
            monitor.cancel()

    def end(self, reason: Reason) -> None:
        """End the actor: every open call gets `ActorDown`, and every monitor fires."""
        assert self.closed is not None
        for from_ in tuple(self.calls):
            from_.fail(ActorDown(self.name, reason))
        self._normal.clear()
        self._control.clear()
        super().end(reason)
        self.owner = None
        self.ended.set()

    def _move_due_timers(self) -> None:
        now = trio.current_time()
        while self._timers and self._timers[0].deadline <= now:
            self._control.append(self._timers.pop(0))


T = TypeVar("T")


class From(Lifetime, Generic[T]):
    """A caller that waits for a reply of type T. It ends with the answer, or when the caller stops waiting."""

    __slots__ = ("_mailbox", "_replied", "_task")

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__()
        self._mailbox = mailbox
        self._task = trio.lowlevel.current_task()
        self._replied = False

    async def answer(self, deadline: float) -> T:
        """Wait in the calling task until the reply, or until the task is cancelled or `deadline` passes."""

        def give_up(_: object) -> trio.lowlevel.Abort:
            # Abandon the call here, not when the task runs again: a reply in between would find the task awake already.
            self._abandon(Exit.TIMEOUT if trio.current_time() >= deadline else Exit.CANCELLED)
            return trio.lowlevel.Abort.SUCCEEDED

        result: T = await trio.lowlevel.wait_task_rescheduled(give_up)
        return result

    def reply(self, result: "outcome.Outcome[T]") -> None:
        """Answer the call; an actor may do this once."""
        assert not self._replied, f"a second reply to one call of {self._mailbox.name!r}"
        self._replied = True
        if self.alive:
            self._settle(result)
        else:
            self._mailbox.telemetry.execute("actor.reply_dropped", {}, {"name": self._mailbox.name})

    def fail(self, error: ActorDown) -> None:
        """Answer in place of an actor that has ended."""
        self._settle(outcome.Error(error))

    def _abandon(self, reason: Exit) -> None:
        """End the call of a caller that no longer waits: remove the request from the mailbox, and fire monitors."""
        del self._mailbox.calls[self]
        self._mailbox.discard(self)
        self.end(reason)
        metadata = {"name": self._mailbox.name, "reason": reason}
        self._mailbox.telemetry.execute("actor.call_abandoned", {}, metadata)

    def _settle(self, result: "outcome.Outcome[T]") -> None:
        del self._mailbox.calls[self]
        for monitor in tuple(self.watchers):
            monitor.release()
        self.end(Exit.NORMAL)
        trio.lowlevel.reschedule(self._task, result)


def reply(from_: From[T], value: T) -> None:
    """Answer a call after its `handle_call` returned NOREPLY; exactly once, on the event loop's thread.

    The reply is dropped if the caller has left.
    """
    from_.reply(outcome.Value(value))


def reply_error(from_: From[Any], error: Exception) -> None:
    """Answer a call by raising `error` in the caller: this instance, with a traceback that starts there."""
    from_.reply(outcome.Error(error.with_traceback(None)))


class ActorRef:
    """A reference to an actor, for the event loop's thread.

    Args:
        name: the actor's name in errors.
        find: returns the mailbox, or raises ActorDown; a registry's refs look the actor up at each use.
    """

    __slots__ = ("_find", "name")

    def __init__(self, name: str, find: Callable[[], Mailbox]) -> None:
        self.name = name
        self._find = find

    def __repr__(self) -> str:
        return f"<ActorRef {self.name!r}>"

    @trio.lowlevel.enable_ki_protection  # an interrupt between sending and waiting would lose the call
    async def call(self, request: object, *, timeout: float | None = 5.0, control: bool = False) -> Any:
        """Send `request` to `handle_call` and return the reply.

        If the waiting task is cancelled or times out, a request that is not handled yet is taken back. For a handled
        request, monitors on its From fire, and a later reply is dropped. A call ends with exactly one of reply, error
        and cancellation.

        Args:
            timeout: seconds; None waits for as long as the actor lives.
            control: send on the control lane, ahead of a full mailbox.

        Raises:
            CallTimeout: no reply in time.
            ActorDown: the actor is not running, or ended before it replied.
            MailboxFull: the mailbox is full.
            Exception: the error that the actor passed to `reply_error`.
        """
        try:
            mailbox = self._find()
            assert mailbox.owner is not trio.lowlevel.current_task(), f"{self.name!r} would wait for itself"
            from_: From[Any] = From(mailbox)
            mailbox.put(from_, control=control)
        except ActorError:
            await trio.lowlevel.checkpoint()  # a caller that retries in a loop must let the actor run
            raise
        mailbox.calls[from_] = request
        if timeout is None:
            return await from_.answer(inf)
        deadline = trio.current_time() + timeout
        with trio.CancelScope(deadline=deadline):
            return await from_.answer(deadline)
        raise CallTimeout(self.name, timeout)

    def cast(self, message: object, *, control: bool = False) -> None:
        """Send `message` to `handle_cast`, without a reply.

        Raises:
            ActorDown: the actor is not running.
            MailboxFull: the mailbox is full; never raised with `control`.
        """
        self._find().put(Cast(message), control=control)

    def info(self, message: object, *, control: bool = False) -> None:
        """Send `message` to `handle_info`; raises as `cast` does."""
        self._find().put(Info(message), control=control)

    async def stop(self, reason: Reason = Exit.NORMAL, timeout: float | None = 5.0) -> None:
        """End the actor after its current message, and wait for its end; an ended actor is no error.

        Raises:
            CallTimeout: the actor has not ended within `timeout` seconds; it will end later.
        """
        try:
            mailbox = self._find()
        except ActorDown:
            await trio.lowlevel.checkpoint()
            return
        assert mailbox.owner is not trio.lowlevel.current_task(), f"{self.name!r} would wait for itself"
        if mailbox.closed is None:
            mailbox.put(Stop(reason), control=True)
        with trio.move_on_after(inf if timeout is None else timeout):
            await mailbox.ended.wait()
            return
        assert timeout is not None
        raise CallTimeout(self.name, timeout)

    @property
    def alive(self) -> bool:
        """Whether the actor accepts messages."""
        try:
            return self._find().closed is None
        except ActorDown:
            return False

    async def wait(self) -> Reason:
        """Wait until the actor has ended, terminate included, and return the reason."""
        mailbox = self.lifetime
        await mailbox.ended.wait()
        assert mailbox.reason is not None
        return mailbox.reason

    @property
    def lifetime(self) -> Mailbox:
        """The actor's lifetime, for monitors.

        Raises:
            ActorDown: no actor has the name now.
        """
        return self._find()


# After this many messages or seconds, other tasks get a turn, even if the mailbox never empties. A turn of trio's
# scheduler costs about 5 us. Sixteen messages with long lists of token ids took thirty milliseconds.
MESSAGES_PER_TURN, TURN_S = 16, 0.002


class NoReply(enum.Enum):
    """The type of NOREPLY."""

    NOREPLY = "noreply"


NOREPLY: Final[Literal[NoReply.NOREPLY]] = NoReply.NOREPLY


class GenServer:
    """Subclass it and override callbacks. A subclass may define `__init__` and need not call this class's."""

    ref: ActorRef  # of this actor, from `init` on
    telemetry: Telemetry  # for the actor's own events

    # Callbacks.

    async def init(self) -> None:
        """Run before any message; `start` returns after it. If it raises, the actor does not start."""

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        """Return the reply, or NOREPLY to call `reply(from_, value)` or `reply_error(from_, error)` later."""
        raise NotImplementedError(f"{type(self).__name__} handles no call: {request!r}")

    async def handle_cast(self, message: Any) -> None:
        """Handle a message of `ActorRef.cast`."""
        raise NotImplementedError(f"{type(self).__name__} handles no cast: {message!r}")

    async def handle_info(self, message: Any) -> None:
        """Handle all other messages: `Down`, timers and messages of `ActorRef.info`."""
        metadata = {"name": self.ref.name, "message": message}
        self.telemetry.execute("actor.unhandled_info", {}, metadata)

    async def terminate(self, reason: Reason) -> None:
        """Run once, at the actor's end, if `init` succeeded.

        New messages are refused by then; open calls can still be answered. This method is shielded from cancellation,
        for at most the actor's shutdown time.
        """

    # For callbacks.

    def send_after(self, delay_s: float, message: object) -> Timer:
        """Send `message` to `handle_info` in `delay_s` seconds, on the control lane."""
        return self._mailbox.put_after(delay_s, message)

    def monitor(self, target: From[Any] | ActorRef) -> Monitor:
        """Request one `Down` when a caller stops waiting or an actor ends; it comes at once if that has happened.

        Raises:
            ActorDown: `target` is a registry's ref and no actor has the name now.
        """
        return Monitor(target, target if isinstance(target, From) else target.lifetime, self._mailbox)

    def stop(self, reason: Reason = Exit.NORMAL) -> None:
        """End the actor after this callback; an exception as the reason counts as a crash."""
        if self._stop_reason is None:
            self._stop_reason = reason

    # The loop.

    _mailbox: Mailbox
    _stop_reason: Reason | None

    def _attach(self, mailbox: Mailbox) -> None:
        """Prepare the actor for `init`."""
        self.ref = ActorRef(mailbox.name, lambda: mailbox)
        self.telemetry = mailbox.telemetry
        self._mailbox = mailbox
        self._stop_reason = None
        mailbox.owner = trio.lowlevel.current_task()

    async def _serve(self) -> Reason:
        """Handle messages until the actor is stopped, and return the reason."""
        handled, taken_s = 0, 0.0  # in this turn
        while self._stop_reason is None:
            envelope = await self._mailbox.get()
            started = trio.current_time()
            await (self._observe(envelope) if self.telemetry.handlers else self._handle(envelope))
            handled += 1
            taken_s += trio.current_time() - started
            if handled == MESSAGES_PER_TURN or taken_s > TURN_S:
                handled, taken_s = 0, 0.0
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
            value = await self.handle_call(self._mailbox.calls[envelope], envelope)
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
    """Run `actor` in `nursery`, and return its ref after `init`.

    An exception that ends the actor is raised in the nursery, as any task's is.

    Args:
        name: the actor's name in errors and telemetry; None takes the class's name.
        mailbox_size: most messages waiting on the normal lane.
        shutdown_s: seconds that `terminate` may take.

    Raises:
        Exception: the error of `init`.
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
    """Run the actor in the current task until its end; raise the error that ended it."""
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
    """Run the callback; its own failure must not hide an earlier failure."""
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
    """Return the reason of the end; nurseries of a callback may wrap a cancellation in groups."""
    if isinstance(error, BaseExceptionGroup):
        rest = error.split(trio.Cancelled)[1]
        return Exit.CANCELLED if rest is None else error
    return Exit.CANCELLED if isinstance(error, trio.Cancelled) else error
