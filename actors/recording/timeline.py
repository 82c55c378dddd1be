"""Timeline: a flight record in lines for a person."""

from genbatch.actors.recording import records
from genbatch.actors.recording.records import Draw, Header, Part, Record, Tick


class Timeline:
    """Numbers the ticks, and tells times from the record's beginning."""

    def __init__(self) -> None:
        self._num_ticks = 0

    def line(self, header: Header, record: Record) -> str:
        """One line without its end."""
        if isinstance(record, Tick):
            self._num_ticks += 1
            return f"{'':12}tick {self._num_ticks}: {self.plan(record)}"
        return f"{record.time - header.time:10.6f}  {_told(record)}"

    @staticmethod
    def plan(tick: Tick | None) -> str:
        """Forwards as REQUEST.CHOICE@SLOT[FIRST:LAST], the positions that it evaluates; "held" is a held prompt."""
        if tick is None:
            return "no tick"
        said = [" ".join(_part(part) for part in group) for group in tick.groups]
        for name, who in (("paused", tick.paused), ("refused", tick.refused)):
            if who:
                said.append(f"{name} {' '.join(_name(*pair) for pair in who)}")
        if tick.sitting_out:
            said.append(f"{len(tick.sitting_out)} left out")
        return " | ".join(said) or "nothing to do"


def _told(record: Record) -> str:
    match record:
        case Header():
            return "the batcher starts"
        case records.Arrived(request=number, request_id=name, wanted=wanted):
            deadline = "" if wanted.deadline_s is None else f", {wanted.deadline_s:g} s to its deadline"
            return f"request {number} ({name}) arrives: n {wanted.n}, at most {wanted.max_tokens} tokens{deadline}"
        case records.Encoded(request=number, tokens=tokens, refusal=refusal):
            return f"request {number} has {len(tokens)} tokens" if refusal is None else f"request {number}: {refusal}"
        case records.Left(request=number):
            return f"the caller of request {number} leaves"
        case records.Stepped(fault=None, draws=draws):
            return f"a step ends: {' '.join(_drawn(draw) for draw in draws)}"
        case records.Stepped(fault=fault, reason=reason):
            return f"a step fails, {fault}: {reason}"
        case records.Draining():
            return "draining"
        case records.DrainOver():
            return "draining is over"
        case records.Prompted():
            return "time for a tick"
        case records.Ended(reason=reason):
            return f"the record ends: {reason}"
        case Tick():
            raise AssertionError("a tick has no time of its own")


def _drawn(draw: Draw | None) -> str:
    if draw is None:
        return "-"
    if draw.fault is not None:
        return f"({draw.fault})"
    return f"{draw.token} ({draw.end})" if draw.end else str(draw.token)


def _part(part: Part) -> str:
    return f"{_name(part.request, part.choice)}@{part.slot}[{part.start}:{part.start + part.num_tokens}]"


def _name(request: int, choice: int) -> str:
    return f"{request}.{choice}" if request else f"held{choice}"
