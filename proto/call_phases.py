"""Where each call of a connection is: one table for both ends, so that neither can be in a state the other cannot."""

import enum


class CallPhase(enum.Enum):
    """A call between its request and its one final; a msgid with no phase is free."""

    WAITING = "waiting"
    STREAMING = "streaming"  # at least one token went by
    CANCELLED = "cancelled"  # its caller wants no more of it; the final is still to come


class CallEvent(enum.Enum):
    """What is sent at one end and received at the other."""

    REQUEST = "request"
    TOKEN = "token"
    CANCEL = "cancel"
    FINAL = "final"  # a result or an error


_TRANSITIONS: dict[tuple[CallPhase | None, CallEvent], CallPhase | None] = {
    (None, CallEvent.REQUEST): CallPhase.WAITING,
    (CallPhase.WAITING, CallEvent.TOKEN): CallPhase.STREAMING,
    (CallPhase.STREAMING, CallEvent.TOKEN): CallPhase.STREAMING,
    # Tokens cross a cancellation on their way, and a cancellation crosses the final.
    (CallPhase.CANCELLED, CallEvent.TOKEN): CallPhase.CANCELLED,
    (None, CallEvent.CANCEL): None,
    (CallPhase.WAITING, CallEvent.CANCEL): CallPhase.CANCELLED,
    (CallPhase.STREAMING, CallEvent.CANCEL): CallPhase.CANCELLED,
    (CallPhase.CANCELLED, CallEvent.CANCEL): CallPhase.CANCELLED,
    (CallPhase.WAITING, CallEvent.FINAL): None,
    (CallPhase.STREAMING, CallEvent.FINAL): None,
    (CallPhase.CANCELLED, CallEvent.FINAL): None,
}


class IllegalEvent(Exception):
    """The event cannot happen to a call in its phase; nothing changed."""

    def __init__(self, msgid: int, phase: CallPhase | None, event: CallEvent) -> None:
        where = "not open" if phase is None else phase.value
        super().__init__(f"{event.value} for call {msgid}, which is {where}")


class CallPhases:
    """The phases of one connection's open calls, by msgid."""

    __slots__ = ("_phases",)

    def __init__(self) -> None:
        self._phases: dict[int, CallPhase] = {}

    def __len__(self) -> int:
        return len(self._phases)

    def __contains__(self, msgid: int) -> bool:
        return msgid in self._phases

    def open_calls(self) -> list[int]:
        """The msgids without a final yet, oldest first."""
        return list(self._phases)

    def move(self, msgid: int, event: CallEvent) -> CallPhase | None:
        """Lets `event` happen; returns the phase before it.

        Raises:
            IllegalEvent: it cannot happen now.
        """
        before = self._phases.get(msgid)
        if (before, event) not in _TRANSITIONS:
            raise IllegalEvent(msgid, before, event)
        after = _TRANSITIONS[before, event]
        if after is not None:
            self._phases[msgid] = after
        elif before is not None:
            del self._phases[msgid]
        return before
