"""LinkedGateways: the EngineLink and the gateways in front of it: all of a service but its engine."""

from collections.abc import Callable

from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.engine.engine_link import EngineLink
from genbatch.actors.engine.link_host import LinkHost
from genbatch.actors.gateways.listeners import Listeners
from genbatch.actors.runtime.supervisor import ChildSpec, Registry, Supervisor, Task
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.service_options import ServiceOptions

# Callers wait in the mailbox only while a message is being handled; the ledger and the Batcher have their own bounds.
MAILBOX_SIZE = 4096


class LinkedGateways:
    """A supervisor's tree; rest_for_one: a link that crashed takes its gateways along.

    Args:
        batcher: whose limits the link knows, too.
        options: where to listen.
        on_hung: see EngineLink.

    Raises:
        AddressError, KeyFileError: it must not listen there.
    """

    def __init__(
        self,
        batcher: BatcherOptions,
        options: ServiceOptions,
        *,
        on_hung: Callable[[str], None],
    ) -> None:
        self.telemetry, registry = Telemetry(), Registry()
        self.link = registry.ref("link")
        self._listeners = Listeners(self.link, options)
        self.side = LinkHost(self.link)

        def new_link() -> EngineLink:
            return EngineLink(batcher, on_hung)

        def new_host() -> Task:
            return self.side.run

        self.supervisor = Supervisor(
            [
                ChildSpec("link", new_link, mailbox_size=MAILBOX_SIZE),
                ChildSpec("link_host", new_host),
                *self._listeners.children(),
            ],
            strategy="rest_for_one",
            name="gateways",
            registry=registry,
            telemetry=self.telemetry,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where clients can connect, once the supervisor has started."""
        return self._listeners.addresses
