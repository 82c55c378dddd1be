"""Registry: names for actors, so that a ref can outlive the actor behind it.

registry.register("counter", ref)
counter = registry.ref("counter")    # finds whoever has the name at each use
await counter.call("value")          # ActorDown while nobody has it
"""

from functools import partial

from genbatch.actors.runtime.errors import ActorDown, NameTaken
from genbatch.actors.runtime.mailbox import Mailbox
from genbatch.actors.runtime.ref import ActorRef


class Registry:
    """Which running actor has which name."""

    def __init__(self) -> None:
        self._refs: dict[str, ActorRef] = {}

    def register(self, name: str, ref: ActorRef) -> None:
        """Gives `name` to an actor; the name of an actor that has ended is free.

        Raises:
            NameTaken: a running actor has it.
        """
        if self.whereis(name) is not None:
            raise NameTaken(name)
        self._refs[name] = ref

    def unregister(self, name: str, ref: ActorRef) -> None:
        """Frees `name` if `ref` still has it."""
        if self._refs.get(name) is ref:
            del self._refs[name]

    def whereis(self, name: str) -> ActorRef | None:
        """The running actor that has the name now."""
        ref = self._refs.get(name)
        return ref if ref is not None and ref.alive else None

    def ref(self, name: str) -> ActorRef:
        """A ref that looks the name up at each use and so survives restarts; the name may be free yet."""
        return ActorRef(name, partial(self._find, name))

    def _find(self, name: str) -> Mailbox:
        ref = self._refs.get(name)
        if ref is None:
            raise ActorDown(name)
        return ref.lifetime
