"""ActorRef, what clients of an actor hold, and From, the open half of a call."""

from collections.abc import Callable
from math import inf
from typing import Any, Generic, TypeVar

import outcome
import trio

from genbatch.actors.runtime.errors import ActorDown, ActorError, CallTimeout
from genbatch.actors.runtime.mailbox import Cast, Info, Mailbox, Stop
from genbatch.actors.runtime.monitor import Exit, Lifetime, Reason

T = TypeVar("T")


class From(Lifetime, Generic[T]):
    """Who waits for a reply of type T. It ends when it is answered or when the caller stops waiting."""

    __slots__ = ("_mailbox", "_replied", "_task", "request")

    def __init__(self, request: object, mailbox: Mailbox) -> None:
        super().__init__()
        self.request = request
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
        assert not self._replied, f"a second reply to {self.request!r}"
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
            from_: From[Any] = From(request, mailbox)
            mailbox.put(from_, control=control)
        except ActorError:
            await trio.lowlevel.checkpoint()  # a caller that retries in a loop must let the actor run
            raise
        mailbox.calls[from_] = None
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
