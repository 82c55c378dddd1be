"""Listeners: the gateways that a service's options ask for, in whichever process they run."""

from typing import TYPE_CHECKING

from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.http.http_address import check_http, parse_http_address
from genbatch.actors.gateways.rpc_address import check_rpc_address
from genbatch.actors.gateways.rpc_gateway import RPCGateway
from genbatch.actors.gateways.security import Security, open_security
from genbatch.actors.gateways.zeromq_address import check_address
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.runtime.supervisor import ChildSpec, Task
from genbatch.actors.service_options import ServiceOptions

if TYPE_CHECKING:  # needs an extra
    from genbatch.actors.gateways.http.http_gateway import HTTPGateway

# Seconds in which answers that were just given leave for their clients, before the listeners are stopped.
LAST_WORDS_S = 0.2


class Listeners:
    """One gateway for each address; children for a supervisor.

    Args:
        batcher: who generates; a ref that survives restarts.
        options: where to listen.

    Raises:
        AddressError, KeyFileError: as `check_listeners`.
    """

    def __init__(self, batcher: ActorRef, options: ServiceOptions) -> None:
        self._batcher = batcher
        self._options = options
        self._security = check_listeners(options)
        self._zeromq: ZeroMQGateway | None = None
        self._rpc: RPCGateway | None = None
        self._http: HTTPGateway | None = None

    def children(self) -> list[ChildSpec]:
        """The gateways; one that crashed can be started anew alone."""
        children = []
        if self._options.bind is not None:
            children.append(ChildSpec("zeromq", self._new_zeromq))
        if self._options.rpc_bind is not None:
            children.append(ChildSpec("rpc", self._new_rpc))
        if self._options.http is not None:
            children.append(ChildSpec("http", self._new_http))
        return children

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where clients can connect, once the children have started."""
        return tuple(gateway.address for gateway in (self._zeromq, self._rpc, self._http) if gateway is not None)

    def _new_zeromq(self) -> Task:
        assert self._options.bind is not None
        self._zeromq = ZeroMQGateway(Dispatcher(self._batcher), self._options.bind, self._security)
        return self._zeromq.run

    def _new_rpc(self) -> Task:
        assert self._options.rpc_bind is not None
        self._rpc = RPCGateway(Dispatcher(self._batcher), self._options.rpc_bind, self._security)
        return self._rpc.run

    def _new_http(self) -> Task:
        from genbatch.actors.gateways.http.http_gateway import HTTPGateway

        assert self._options.http is not None
        address = parse_http_address(self._options.http)
        self._http = HTTPGateway(Dispatcher(self._batcher), address, self._security)
        return self._http.run


def check_listeners(options: ServiceOptions) -> Security:
    """Reads what keeps strangers out, and tells a mistake before a model is loaded.

    Raises:
        AddressError: strangers could come in at an address, or it is none.
        KeyFileError: a file is missing, faulty or exposed.
        OptionError: an extra is missing.
    """
    security = open_security(
        keys=options.keys, tokens=options.tokens, tls_cert=options.tls_cert, tls_key=options.tls_key
    )
    if options.bind is not None:
        check_address(options.bind, lacking=security.lacking_for_zeromq)
    if options.rpc_bind is not None:
        check_rpc_address(options.rpc_bind, lacking=security.lacking_for_tokens)
    if options.http is not None:
        check_http(options.http, security)
    return security
