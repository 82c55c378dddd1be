"""The gateways of a service, and the process that has nothing else: every address, and the link to the engine process.

It remembers the accepted requests, so clients notice an engine's death by the ends of their requests at most, never by
a connection's. Imports no torch.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import (
    ControlChannel,
    DrainAndStop,
    GatewayReady,
    Hung,
    Join,
    StartFault,
    StartGateway,
    decode_options,
    keep_for_good,
    run_child,
)
from genbatch.actors.engine.freed_memory import keep_returning_freed_memory
from genbatch.actors.engine.remote_batcher import EngineConnections, RemoteBatcher
from genbatch.actors.gateways.addresses import (
    check_address,
    check_http,
    check_nobody_listens,
    check_rpc_address,
    parse_http_address,
)
from genbatch.actors.gateways.connection_limit import AMPLE_FILES, LEAST_FILES, allow_files
from genbatch.actors.gateways.dispatcher import Callee, Dispatcher
from genbatch.actors.gateways.rpc_gateway import RPCGateway
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.observing.observe import observe
from genbatch.actors.runtime.actor import ActorRef
from genbatch.actors.runtime.errors import StartFailed
from genbatch.actors.runtime.supervisor import ChildSpec, Intensity, Registry, Supervisor, Task, background
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.scheduling.spec import check_scheduler
from genbatch.actors.security.key_files import AddressError
from genbatch.actors.security.security import Security, open_security
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.served_models import ServedModels
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.nif.models.model_names import check_source, written_path
from genbatch.proto.messages import DrainRequest

if TYPE_CHECKING:  # needs an extra
    from genbatch.actors.gateways.http.http_gateway import HTTPGateway

# Seconds in which answers that were just given leave for their clients, before the listeners are stopped.
LAST_WORDS_S = 0.2


# A gateway is what strangers reach, so no number of its restarts ends the service. Beyond these it is restarted once
# a second.
OF_GATEWAYS = Intensity(max_restarts=3, max_seconds=5.0, pause_s=1.0)


class Listeners:
    """One gateway for each address; `child` is for a supervisor.

    Args:
        batcher: who generates; a ref that survives restarts.
        options: where to listen.
        telemetry: is told of the gateways' restarts.
        of_fleet: see Dispatcher.

    Raises:
        AddressError, KeyFileError: as `check_listeners`.
    """

    def __init__(
        self, batcher: Callee, options: ServiceOptions, telemetry: Telemetry, *, of_fleet: bool = False
    ) -> None:
        self._batcher = batcher
        self._telemetry = telemetry
        self._of_fleet = of_fleet
        self._options = options
        self._security = check_listeners(options)
        self._zeromq: ZeroMQGateway | None = None
        self._rpc: RPCGateway | None = None
        self._http: HTTPGateway | None = None
        self._metrics: HTTPGateway | None = None

    def child(self) -> ChildSpec:
        """All gateways; one that crashed is started anew alone."""
        return ChildSpec("gateways", lambda: self._run)

    async def _run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs each gateway under a supervisor of its own: while one is started anew, another can be, too."""
        async with background() as nursery:
            for child in self.gateways():
                supervisor = Supervisor([child], intensity=OF_GATEWAYS, name=child.id, telemetry=self._telemetry)
                try:
                    await nursery.start(supervisor.run)
                except StartFailed as error:
                    raise (error.__cause__ or error) from None
            task_status.started()
            await trio.sleep_forever()

    def gateways(self) -> list[ChildSpec]:
        """One for each address."""
        children = []
        if self._options.bind is not None:
            children.append(ChildSpec("zeromq", self._new_zeromq))
        if self._options.rpc_bind is not None:
            children.append(ChildSpec("rpc", self._new_rpc))
        if self._options.http is not None:
            children.append(ChildSpec("http", self._new_http))
        if self._options.metrics is not None:
            children.append(ChildSpec("metrics", self._new_metrics))
        return children

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where clients can connect, once the children have started."""
        gateways = (self._zeromq, self._rpc, self._http)
        found = [gateway.address for gateway in gateways if gateway is not None]
        if self._metrics is not None:
            found.append(f"{self._metrics.address}/metrics")  # else the list would have two doors that look alike
        return tuple(found)

    def _new_zeromq(self) -> Task:
        assert self._options.bind is not None
        self._zeromq = ZeroMQGateway(self._dispatcher(), self._options.bind, self._security)
        return self._zeromq.run

    def _new_rpc(self) -> Task:
        assert self._options.rpc_bind is not None
        self._rpc = RPCGateway(self._dispatcher(), self._options.rpc_bind, self._security)
        return self._rpc.run

    def _new_http(self) -> Task:
        from genbatch.actors.gateways.http.http_gateway import HTTPGateway

        assert self._options.http is not None
        address = parse_http_address(self._options.http)
        batch_dir = None if self._options.batch_dir is None else Path(self._options.batch_dir)
        self._http = HTTPGateway(
            self._dispatcher(), address, self._security, strict=self._options.http_strict, batch_dir=batch_dir
        )
        return self._http.run

    def _new_metrics(self) -> Task:
        from genbatch.actors.gateways.http.http_gateway import HTTPGateway

        assert self._options.metrics is not None
        address = parse_http_address(self._options.metrics)
        self._metrics = HTTPGateway(Dispatcher(self._batcher), address, only_metrics=True)
        return self._metrics.run

    def _dispatcher(self) -> Dispatcher:
        return Dispatcher(self._batcher, of_fleet=self._of_fleet)


def check_listeners(options: ServiceOptions) -> Security:
    """Reads what keeps strangers out, and tells a mistake before a model is loaded.

    Raises:
        AddressError: strangers could come in at an address, or it is not an address.
        KeyFileError: a file is missing, faulty or exposed.
        OptionError: an extra is missing.
    """
    security = replace(
        open_security(keys=options.keys, tokens=options.tokens, tls_cert=options.tls_cert, tls_key=options.tls_key),
        http_insecure=options.http_insecure,
        allowed_hosts=tuple(options.allowed_hosts),
        allowed_origins=tuple(options.allowed_origins),
    )
    addresses = _addresses(options)
    if addresses and (files := allow_files(LEAST_FILES)) < LEAST_FILES:
        reason = f"this process may open {files} files, a service needs {LEAST_FILES} (`ulimit -n`)"
        raise AddressError(addresses[0], reason)
    if options.bind is not None:
        check_address(options.bind, lacking=security.lacking_for_zeromq)
    if options.rpc_bind is not None:
        check_rpc_address(options.rpc_bind, lacking=security.lacking_for_tokens)
    if options.http is not None:
        check_http(options.http, security)
    if options.metrics is not None:
        parse_http_address(options.metrics)
    return security


def check_start(engine: EngineOptions, batcher: BatcherOptions, options: ServiceOptions) -> None:
    """Looks at what the options name: the model's files, the template's, the scheduler, keys, and each address.

    Raises:
        ModelError: there is no such file, or no model in it; an id of Hugging Face may still turn out to be none.
        OptionError: a file that an option names is not there, or an extra is not installed.
        SchedulerError: the scheduler's name leads nowhere.
        AddressError: an address is not valid, is open to strangers, is taken, or is given twice.
        KeyFileError: a file of keys is missing, faulty or exposed.
    """
    check_listeners(options)  # first: a service that strangers could reach is told so, whatever else is wrong
    check_source(engine.model_path)
    if engine.chat_template and not written_path(engine.chat_template).is_file():
        raise OptionError("chat_template", f"there is no file {engine.chat_template}")
    if batcher.record is not None:
        _check_record(written_path(batcher.record).absolute())
    if isinstance(batcher.scheduler, str):
        check_scheduler(batcher.scheduler)
    seen: set[str] = set()
    for address in _addresses(options):
        if address in seen and not address.endswith((":0", ":*")):
            raise AddressError(address, "it is given twice; each protocol needs an address of its own")
        seen.add(address)
        check_nobody_listens(address)


def _check_record(path: Path) -> None:
    """Raises OptionError where no file can be made; the recorder itself opens it once the model is there."""
    if not path.parent.is_dir():
        raise OptionError("record", f"there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OptionError("record", f"no file can be made in {path.parent}: it may not be written to")


def _addresses(options: ServiceOptions) -> list[str]:
    """Where the service will listen, as tcp://HOST:PORT, ipc://PATH or unix://PATH."""
    found = [address for address in (options.bind, options.rpc_bind) if address is not None]
    for text in (options.http, options.metrics):
        if text is not None:
            wanted = parse_http_address(text)
            host = f"[{wanted.host}]" if ":" in wanted.host else wanted.host
            found.append(f"tcp://{host}:{wanted.port}")
    return found


# Callers wait in the mailbox only while a message is being handled; requests that were accepted have another bound.
MAILBOX_SIZE = 4096


class LinkedGateways:
    """A supervisor's tree; rest_for_one: a link that crashed takes its gateways along.

    Args:
        batcher: whose limits the links know, too.
        options: where to listen.
        on_hung: called with the reason and the place of its link; see RemoteBatcher.
        models: the names of several models, each with a link of its own; none where there is one.
        of_fleet: see Dispatcher.

    Raises:
        AddressError, KeyFileError: it must not listen there.
    """

    def __init__(
        self,
        batcher: BatcherOptions,
        options: ServiceOptions,
        *,
        on_hung: Callable[[str, int], None],
        models: Sequence[str] = (),
        of_fleet: bool = False,
    ) -> None:
        self.telemetry, registry = Telemetry(), Registry()
        places = range(max(1, len(models)))
        self.links: list[ActorRef] = [registry.ref(_link_name(place)) for place in places]
        self.batcher: Callee = self.links[0] if not models else ServedModels(dict(zip(models, self.links, strict=True)))
        self._listeners = Listeners(self.batcher, options, self.telemetry, of_fleet=of_fleet)
        self.sides = [EngineConnections(link) for link in self.links]

        def children(place: int) -> list[ChildSpec]:
            name, side = _link_name(place), self.sides[place]
            link = ChildSpec(
                name, lambda: RemoteBatcher(batcher, lambda reason: on_hung(reason, place)), mailbox_size=MAILBOX_SIZE
            )
            return [link, ChildSpec(f"{name}_host", lambda: side.run)]

        self.supervisor = Supervisor(
            [*(child for place in places for child in children(place)), self._listeners.child()],
            strategy="rest_for_one",
            name="gateways",
            registry=registry,
            telemetry=self.telemetry,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where clients can connect, once the supervisor has started."""
        return self._listeners.addresses


def _link_name(place: int) -> str:
    return "link" if place == 0 else f"link_{place}"


# From so many bytes on a block of memory is the kernel's again as soon as it is freed.
LARGE_BLOCK_BYTES = 2**18
_M_MMAP_THRESHOLD = -3  # glibc's


def return_large_blocks() -> None:
    """Else glibc keeps what large messages were in: it takes the first that is freed for a sign that more will come,
    and from then on puts them among small blocks, which outlive them. Other libraries have no such call."""
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def main() -> None:
    """Runs until the parent says so, or is gone."""
    return_large_blocks()
    allow_files(AMPLE_FILES)
    run_child(lambda channel: GatewayProcess(channel).serve())


class GatewayProcess:
    """What the process does for its parent."""

    def __init__(self, channel: ControlChannel[Any]) -> None:
        self._channel = channel
        self._gateways: LinkedGateways
        self._nursery: trio.Nursery

    async def serve(self) -> None:
        """Returns when the parent says so, or is gone, or after a drain.

        Raises:
            StartFault: an address could not be listened at.
        """
        async with background() as self._nursery:
            self._nursery.start_soon(keep_returning_freed_memory)
            while True:
                match await self._channel.receive():
                    case StartGateway() as start:
                        await self._open(start)
                    case Join() as join:
                        await self._gateways.sides[join.engine].send(join, self._channel.take_socket())
                    case DrainAndStop(timeout_s):
                        self._nursery.start_soon(self._drain, timeout_s)
                    case _:
                        return

    async def _open(self, start: StartGateway) -> None:
        try:
            self._gateways = LinkedGateways(
                decode_options(start.batcher_options, BatcherOptions),
                decode_options(start.service_options, ServiceOptions),
                on_hung=self._tell_hung,
                of_fleet=start.of_fleet,
                models=start.models,
            )
            await self._nursery.start(observe, self._gateways.telemetry)
            await self._nursery.start(self._gateways.supervisor.run)
        except StartFailed as failed:
            cause = failed.__cause__
            raise StartFault(cause if isinstance(cause, Exception) else failed) from failed
        except Exception as error:
            raise StartFault(error) from error
        keep_for_good()
        await self._channel.send(GatewayReady(self._gateways.addresses))

    async def _drain(self, timeout_s: float) -> None:
        await self._gateways.batcher.call(DrainRequest(timeout_s=timeout_s), timeout=None, control=True)
        await trio.sleep(LAST_WORDS_S)
        self._nursery.cancel_scope.cancel()

    def _tell_hung(self, reason: str, engine: int) -> None:
        self._nursery.start_soon(self._tell, Hung(reason, engine))

    async def _tell(self, message: object) -> None:
        with suppress(OSError):  # the parent is gone, which ends this process, too
            await self._channel.send(message)
