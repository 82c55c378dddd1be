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

    caller -- ref.call --> Mailbox -- handle_call(request, From) --> reply --> caller
                              ^                                 |
                              +-- Down, if the caller is gone --+ monitor

A monitor tells one actor, once, that a caller or another actor is gone:

    monitor = self.monitor(from_)         # in handle_call, before returning NOREPLY
    ...
    async def handle_info(self, message):
        if isinstance(message, Down):     # message.monitor is monitor, message.target is from_
            ...                           # the caller was cancelled or timed out: free what it holds

Its record goes away by itself: when it fires, when the call is answered, when either side ends. `cancel` is for
losing interest earlier.

A mailbox has two lanes. The normal lane is bounded: a message that does not fit is refused, never dropped. The
control lane is served first and passes a full normal lane. It has no limit of its own because what is in it is
limited elsewhere: a `Down` per monitor and a timer per `send_after` that the actor itself asked for, a control call
or a stop per waiting task. Whoever sends control casts and infos must likewise have a bounded number under way.
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
from genbatch.actors.runtime.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import MutableSequence


class Exit(enum.Enum):
    """Why an actor or a caller ended, when no exception did it."""

    NORMAL = "normal"
    SHUTDOWN = "shutdown"  # its supervisor told it to stop
    CANCELLED = "cancelled"  # its cancel scope was cancelled
    TIMEOUT = "timeout"  # a caller's patience ended


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
        """Stops watching; no `Down` of this monitor is handled any more, not even one already on its way."""
        self.release()
        if self._down is not None:
            self._mailbox.discard(self._down)

    def fire(self, reason: Reason) -> None:
        """Puts `Down` on the watching actor's control lane."""
        self.release()
        self._down = Down(self, self.target, reason)
        self._mailbox.put(self._down, control=True)

    def release(self) -> None:
        """Removes the record on both sides."""
        self._lifetime.watchers.pop(self, None)
        self._mailbox.monitors.pop(self, None)


@dataclass(frozen=True, slots=True, eq=False)
class Down:
    """What `handle_info` gets when a monitored target is gone."""

    monitor: Monitor
    target: "From[Any] | ActorRef"
    reason: Reason


class Lifetime:
    """What can be monitored: it lives until it ends, once, with a reason."""

    __slots__ = ("reason", "watchers")

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self.watchers: dict[Monitor, None] = {}  # a dict, for its order

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.reason is None

    def end(self, reason: Reason) -> None:
        """Ends it and tells every monitor."""
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
    """Asks the actor to end after the message it is handling."""

    reason: Reason


@dataclass(frozen=True, slots=True, eq=False)
class Timer:
    """A message for `handle_info` at `deadline` (seconds on the event loop's clock)."""

    mailbox: "Mailbox"
    message: object
    deadline: float

    def cancel(self) -> None:
        """Takes the message back, even if it is due already; fine if it was handled."""
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
        self.calls: dict[From[Any], object] = {}  # the requests that are delivered or wait here, and are not answered
        self.monitors: dict[Monitor, None] = {}  # what the actor watches
        self.closed: Reason | None = None
        self.ended = trio.Event()
        self._normal: deque[object] = deque()
        self._control: deque[object] = deque()
        self._timers: list[Timer] = []  # by deadline
        self._reader: trio.lowlevel.Task | None = None  # the actor, while it waits in `get`

    def __len__(self) -> int:
        return len(self._normal) + len(self._control)

    def put(self, envelope: object, *, control: bool = False) -> None:
        """Adds at the end of a lane.

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
        self._wake()

    def put_after(self, delay_s: float, message: object) -> Timer:
        """Puts `message` on the control lane `delay_s` seconds from now."""
        assert delay_s >= 0, delay_s
        timer = Timer(self, message, trio.current_time() + delay_s)
        if self.closed is None:
            insort(self._timers, timer, key=attrgetter("deadline"))
            self._wake()
        return timer

    async def get(self) -> object:
        """The next message; only the actor's own task may wait here. Returns at once when there is one."""
        while True:
            if self._timers:
                self._move_due_timers()
            if self._control:
                return self._control.popleft()
            if self._normal:
                return self._normal.popleft()
            self._reader = trio.lowlevel.current_task()
            if self._timers:
                with trio.CancelScope(deadline=self._timers[0].deadline):
                    await trio.lowlevel.wait_task_rescheduled(self._abort_get)
            else:  # a scope costs as much as all the rest
                await trio.lowlevel.wait_task_rescheduled(self._abort_get)

    def discard(self, envelope: object) -> None:
        """Removes a message nobody wants handled any more; fine if it is not here."""
        lanes: tuple[MutableSequence[Any], ...] = (self._timers, self._control, self._normal)
        for lane in lanes:
            if envelope in lane:
                lane.remove(envelope)

    def close(self, reason: Reason) -> None:
        """Refuses messages from now on, forgets timers and monitors; open calls stay open until `end`."""
        self.closed = reason
        self._timers.clear()
        for monitor in tuple(self.monitors):
            monitor.cancel()

    def end(self, reason: Reason) -> None:
        """The actor is gone: every open call gets `ActorDown`, every monitor a `Down`."""
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

    def _wake(self) -> None:
        if self._reader is not None:
            trio.lowlevel.reschedule(self._reader)
            self._reader = None

    def _abort_get(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED


T = TypeVar("T")


class From(Lifetime, Generic[T]):
    """Who waits for a reply of type T. It ends when it is answered or when the caller stops waiting."""

    __slots__ = ("_mailbox", "_replied", "_task")

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__()
        self._mailbox = mailbox
        self._task = trio.lowlevel.current_task()
        self._replied = False

    async def answer(self, deadline: float) -> T:
        """Waits in the calling task, cancelled at `deadline`. What comes first wins, reply or cancellation."""

        def give_up(_: object) -> trio.lowlevel.Abort:
            # Here, and not when the task runs again: until then a reply could come and find it awake already.
            self._abandon(Exit.TIMEOUT if trio.current_time() >= deadline else Exit.CANCELLED)
            return trio.lowlevel.Abort.SUCCEEDED

        result: T = await trio.lowlevel.wait_task_rescheduled(give_up)
        return result

    def reply(self, result: "outcome.Outcome[T]") -> None:
        """Answers, the one time the actor may."""
        assert not self._replied, f"a second reply to one call of {self._mailbox.name!r}"
        self._replied = True
        if self.alive:
            self._settle(result)
        else:
            self._mailbox.telemetry.execute("actor.reply_dropped", {}, {"name": self._mailbox.name})

    def fail(self, error: ActorDown) -> None:
        """Answers in place of an actor that no longer can."""
        self._settle(outcome.Error(error))

    def _abandon(self, reason: Exit) -> None:
        """The caller no longer waits: the request leaves the mailbox if it is still there, monitors fire."""
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
    """Answers a call whose `handle_call` returned NOREPLY; exactly once, on the event loop's thread.

    If the caller is gone by now the reply is dropped.
    """
    from_.reply(outcome.Value(value))


def reply_error(from_: From[Any], error: Exception) -> None:
    """Answers a call by raising `error` there: this instance, with a traceback that starts at the caller."""
    from_.reply(outcome.Error(error.with_traceback(None)))


class ActorRef:
    """The way to one actor. Everything here is for the event loop's thread.

    Args:
        name: for messages of errors.
        find: returns the mailbox, or raises ActorDown; a registry's refs look it up at each use.
    """

    __slots__ = ("_find", "name")

    def __init__(self, name: str, find: Callable[[], Mailbox]) -> None:
        self.name = name
        self._find = find

    def __repr__(self) -> str:
        return f"<ActorRef {self.name!r}>"

    @trio.lowlevel.enable_ki_protection  # between sending and waiting nothing may come in between
    async def call(self, request: object, *, timeout: float | None = 5.0, control: bool = False) -> Any:
        """Sends `request` to `handle_call` and waits for the reply.

        When the waiting task is cancelled or times out the request is taken back if it was not handled yet,
        otherwise monitors on its From fire; a later reply is dropped. Exactly one of reply, error and
        cancellation comes out.

        Args:
            timeout: seconds; None waits for as long as the actor lives.
            control: passes a full mailbox and the messages that wait in it.

        Raises:
            CallTimeout: no reply in time.
            ActorDown: the actor is not running, or ended before it replied.
            MailboxFull: the request was not taken.
            Exception: what the actor gave to `reply_error`.
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
        """Sends `message` to `handle_cast`, without a reply.

        Raises:
            ActorDown: the actor is not running.
            MailboxFull: the message was not taken; never with `control`.
        """
        self._find().put(Cast(message), control=control)

    def info(self, message: object, *, control: bool = False) -> None:
        """Sends `message` to `handle_info`; raises as `cast` does."""
        self._find().put(Info(message), control=control)

    async def stop(self, reason: Reason = Exit.NORMAL, timeout: float | None = 5.0) -> None:
        """Asks the actor to end after the message it is handling and waits until it has; fine if it is gone.

        Raises:
            CallTimeout: it has not ended within `timeout` seconds; it still will.
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
        """Whether it takes messages."""
        try:
            return self._find().closed is None
        except ActorDown:
            return False

    async def wait(self) -> Reason:
        """Waits until the actor has ended, terminate included, and returns why."""
        mailbox = self.lifetime
        await mailbox.ended.wait()
        assert mailbox.reason is not None
        return mailbox.reason

    @property
    def lifetime(self) -> Mailbox:
        """What a monitor watches.

        Raises:
            ActorDown: no actor has the name now.
        """
        return self._find()


# Then other tasks get a turn, even if the mailbox never empties: a trio schedule costs ~5 us. Seconds, too: sixteen
# long lists of token ids took thirty milliseconds.
MESSAGES_PER_TURN, TURN_S = 16, 0.002


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

    async def terminate(self, reason: Reason) -> None:
        """Runs once, last, if `init` succeeded, however the actor ends.

        New messages are refused already; open calls can still be replied to. It is shielded from
        cancellation, for at most the actor's shutdown time.
        """

    # What callbacks use.

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
    _stop_reason: Reason | None

    def _attach(self, mailbox: Mailbox) -> None:
        """Makes the actor ready for `init`."""
        self.ref = ActorRef(mailbox.name, lambda: mailbox)
        self.telemetry = mailbox.telemetry
        self._mailbox = mailbox
        self._stop_reason = None
        mailbox.owner = trio.lowlevel.current_task()

    async def _serve(self) -> Reason:
        """Handles messages until told to stop; returns why."""
        handled, taken_s = 0, 0.0  # in this turn
        while self._stop_reason is None:
            envelope = await self._mailbox.get()
            started = trio.current_time()
            await (self._observe(envelope) if self.telemetry.attached else self._handle(envelope))
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
