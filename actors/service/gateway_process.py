"""The gateways of a service at their addresses, with the link to the engine process, and the process that runs them.

This process keeps the accepted requests. So when an engine dies, its clients keep their connections, and at most see
requests end. This file imports no torch.
"""

import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import (
    AddModel,
    ControlChannel,
    DrainAndStop,
    EngineStopped,
    GatewayReady,
    Hung,
    Join,
    Listening,
    ManagedModel,
    ShowModel,
    StartGateway,
    SwitchEngine,
    decode_options,
    run_child,
    set_up_garbage_collection,
    to_message,
)
from genbatch.actors.engine.freed_memory import keep_returning_freed_memory
from genbatch.actors.engine.remote_batcher import RemoteBatcher
from genbatch.actors.gateways.accepting import AMPLE_FILES, LEAST_FILES, allow_files
from genbatch.actors.gateways.addresses import (
    check_address,
    check_http,
    check_nobody_listens,
    parse_http_address,
)
from genbatch.actors.gateways.dispatcher import Callee, Dispatcher
from genbatch.actors.gateways.listening import GatewayKind, ListeningSockets
from genbatch.actors.gateways.rpc_gateway import RPCGateway
from genbatch.actors.gateways.zeromq_gateway import ZeroMQGateway
from genbatch.actors.observing.observe import observe
from genbatch.actors.runtime.errors import StartFailed
from genbatch.actors.runtime.supervisor import ChildSpec, Intensity, Supervisor, Task, background
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.actors.scheduling.scheduler import check_scheduler
from genbatch.actors.security.key_files import AddressError
from genbatch.actors.security.security import Security, open_security
from genbatch.actors.service.model_keeper import ModelKeeper
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.served_models import ServedModels
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.nif.models.model_names import check_sources, written_path
from genbatch.proto.service_messages import DrainRequest

if TYPE_CHECKING:  # needs an extra
    from genbatch.actors.gateways.http.http_gateway import HTTPGateway

# Seconds for the last answers to leave before the listeners are stopped.
LAST_WORDS_S = 0.2
# Seconds that gateways of running engines wait for a link before they listen.
JOIN_S = 5.0
# Seconds between checks whether the last client of a service that was taken over has left.
LOOK_S = 0.05


# Strangers can reach a gateway, so no number of its restarts ends the service. Above this rate it is restarted once a
# second.
OF_GATEWAYS = Intensity(max_restarts=3, max_seconds=5.0, pause_s=1.0)


class Listeners:
    """One gateway for each address; `child` is the spec for a supervisor.

    Args:
        batcher: the Batcher's ref, which survives restarts.
        options: the addresses.
        telemetry: receives the gateways' restarts.
        of_fleet: see Dispatcher.
        sockets: the gateways' listening sockets; None opens sockets for these gateways alone.
        joined: events that the gateways await before they listen, for `JOIN_S` at most.

    Raises:
        AddressError, KeyFileError: see `check_listeners`.
    """

    def __init__(
        self,
        batcher: Callee,
        options: ServiceOptions,
        telemetry: Telemetry,
        *,
        of_fleet: bool = False,
        sockets: ListeningSockets | None = None,
        joined: Sequence[trio.Event] = (),
    ) -> None:
        self._joined = joined
        self._sockets = ListeningSockets() if sockets is None else sockets
        self._owns_sockets = sockets is None
        self._is_retiring = False
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
        """Return a spec of all gateways; a crashed gateway is restarted alone."""
        return ChildSpec("gateways", lambda: self._run)

    async def _run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run each gateway under a supervisor of its own, so that several can be restarted at the same time."""
        with trio.move_on_after(JOIN_S):
            for event in self._joined:
                await event.wait()
        async with background() as nursery:
            for child in self.gateways():
                supervisor = Supervisor([child], intensity=OF_GATEWAYS, name=child.id, telemetry=self._telemetry)
                try:
                    await nursery.start(supervisor.run)
                except StartFailed as error:
                    raise (error.__cause__ or error) from None
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                if self._owns_sockets:
                    self._sockets.close()

    async def retire(self, timeout_s: float) -> None:
        """Leave new connections to the service that has taken over, and serve the connected clients.

        The method returns when these clients have left, or after `timeout_s` seconds. Then clients over ZeroMQ and
        msgpack-RPC continue their open requests at the other service.
        """
        self._is_retiring = True
        for running in self._running:
            running.retire()
        with trio.move_on_after(timeout_s) as scope:
            while any(gateway.num_connections for gateway in self._running):  # noqa: ASYNC110 - libzmq has no event for it
                await trio.sleep(LOOK_S)
        if scope.cancelled_caught:
            for gateway in (self._zeromq, self._rpc):
                if gateway is not None:
                    gateway.hand_over()

    @property
    def _running(self) -> list["ZeroMQGateway | RPCGateway | HTTPGateway"]:
        gateways = (self._zeromq, self._rpc, self._http, self._metrics)
        return [gateway for gateway in gateways if gateway is not None]

    def gateways(self) -> list[ChildSpec]:
        """Return one spec for each address."""
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
        """The addresses for clients, once the children have started."""
        addresses = [gateway.address for gateway in self._running if gateway is not self._metrics]
        if self._metrics is not None:
            addresses.append(f"{self._metrics.address}/metrics")  # so that the two HTTP addresses look different
        return tuple(addresses)

    def _new_zeromq(self) -> Task:
        assert self._options.bind is not None
        self._zeromq = ZeroMQGateway(self._dispatcher(), self._options.bind, self._security, sockets=self._sockets)
        return self._unless_retiring(self._zeromq.run)

    def _new_rpc(self) -> Task:
        assert self._options.rpc_bind is not None
        self._rpc = RPCGateway(self._dispatcher(), self._options.rpc_bind, self._security, sockets=self._sockets)
        return self._unless_retiring(self._rpc.run)

    def _new_http(self) -> Task:
        from genbatch.actors.gateways.http.batch_store import BatchStore
        from genbatch.actors.gateways.http.http_gateway import HTTPGateway

        options, store = self._options, None
        assert options.http is not None
        if options.batch_dir is not None:
            store = BatchStore(Path(options.batch_dir), waits=options.take_over)
        self._http = HTTPGateway(
            self._dispatcher(),
            parse_http_address(options.http),
            self._security,
            strict=options.http_strict,
            store=store,
            sockets=self._sockets,
        )
        return self._unless_retiring(self._http.run)

    def _new_metrics(self) -> Task:
        from genbatch.actors.gateways.http.http_gateway import MetricsGateway

        assert self._options.metrics is not None
        address = parse_http_address(self._options.metrics)
        self._metrics = MetricsGateway(Dispatcher(self._batcher), address, sockets=self._sockets)
        return self._unless_retiring(self._metrics.run)

    def _unless_retiring(self, run: Task) -> Task:
        """Do not restart a gateway that crashes while it retires, since another service has its sockets."""
        return _rest if self._is_retiring else run

    def _dispatcher(self) -> Dispatcher:
        return Dispatcher(self._batcher, of_fleet=self._of_fleet)


async def _rest(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    task_status.started()
    await trio.sleep_forever()


async def retire(listeners: Listeners, batcher: Callee, timeout_s: float) -> None:
    """Serve the connected clients for `timeout_s` seconds at most; then end the open requests and return."""
    deadline = trio.current_time() + timeout_s
    await listeners.retire(timeout_s)
    left_s = max(0.0, deadline - trio.current_time())
    await batcher.call(DrainRequest(timeout_s=left_s), timeout=None, control=True)
    await trio.sleep(LAST_WORDS_S)


def check_listeners(options: ServiceOptions) -> Security:
    """Read the key, token and certificate files, so that mistakes show before a model is loaded.

    Raises:
        AddressError: an address is invalid, or strangers could reach it.
        KeyFileError: a file is missing, faulty or exposed.
        OptionError: an extra is missing.
    """
    security = replace(
        open_security(keys=options.keys, tokens=options.tokens, tls_cert=options.tls_cert, tls_key=options.tls_key),
        http_insecure=options.http_insecure,
        allowed_hosts=tuple(options.allowed_hosts),
        allowed_origins=tuple(options.allowed_origins),
    )
    addresses = list(gateway_addresses(options).values())
    if addresses and (files := allow_files(LEAST_FILES)) < LEAST_FILES:
        reason = f"this process may open {files} files, a service needs {LEAST_FILES} (`ulimit -n`)"
        raise AddressError(addresses[0], reason)
    if options.bind is not None:
        check_address("bind", options.bind, lacking=security.lacking_for_zeromq)
    if options.rpc_bind is not None:
        check_address("rpc_bind", options.rpc_bind, lacking=security.lacking_for_tokens)
    if options.http is not None:
        check_http(options.http, security)
    if options.metrics is not None:
        parse_http_address(options.metrics)
    return security


def check_start(
    engine: EngineOptions, batcher: BatcherOptions, options: ServiceOptions, sockets: ListeningSockets | None = None
) -> None:
    """Check what the options name: the model's files, the template's, the scheduler, keys, and each address.

    Args:
        sockets: sockets that are open already; their addresses need not be free.

    Raises:
        ModelError: there is no such file, or no model in it; an id of Hugging Face may still turn out to be none.
        OptionError: a file that an option names is missing, or an extra is not installed.
        SchedulerError: the scheduler's name leads to no scheduler.
        AddressError: an address is not valid, is open to strangers, is taken, or is given twice.
        KeyFileError: a file of keys is missing, faulty or exposed.
    """
    check_listeners(options)  # first: exposure to strangers is the most important error
    check_sources(engine)
    if batcher.record is not None:
        _check_record(written_path(batcher.record).absolute())
    if isinstance(batcher.scheduler, str):
        check_scheduler(batcher.scheduler)
    seen: set[str] = set()
    for kind, address in gateway_addresses(options).items():
        if address in seen and not address.endswith((":0", ":*")):
            raise AddressError(address, "it is given twice; each protocol needs an address of its own")
        seen.add(address)
        if sockets is None or kind not in sockets:
            check_nobody_listens(address)


def _check_record(path: Path) -> None:
    """Raise OptionError if the file cannot be created; the recorder opens the file after the model is loaded."""
    if not path.parent.is_dir():
        raise OptionError("record", f"there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OptionError("record", f"no file can be made in {path.parent}: it may not be written to")


def gateway_addresses(options: ServiceOptions) -> dict[GatewayKind, str]:
    """Return the listening addresses as tcp://HOST:PORT, ipc://PATH or unix://PATH."""
    addresses: dict[GatewayKind, str] = {}
    if options.bind is not None:
        addresses["zeromq"] = options.bind
    if options.rpc_bind is not None:
        addresses["rpc"] = options.rpc_bind
    if options.http is not None:
        addresses["http"] = parse_http_address(options.http).tcp
    if options.metrics is not None:
        addresses["metrics"] = parse_http_address(options.metrics).tcp
    return addresses


class LinkedGateways:
    """The supervisor tree of links and gateways; rest_for_one: a crashed link restarts its gateways, too.

    Args:
        batcher: the Batcher's options, with limits that the links apply, too.
        options: the addresses.
        on_hung: called with the reason and the index of its link; see RemoteBatcher.
        start: the parent's message, with the names of several models; each has a link of its own.
        sockets: see Listeners.
        switch: called with SwitchEngine for the engine of a model that is loaded on demand.

    Raises:
        AddressError, KeyFileError: a gateway must not listen at its address.
    """

    def __init__(
        self,
        batcher: BatcherOptions,
        options: ServiceOptions,
        *,
        on_hung: Callable[[str, int], None],
        start: StartGateway | None = None,
        sockets: ListeningSockets | None = None,
        switch: Callable[[SwitchEngine], None] = lambda message: None,
    ) -> None:
        self.telemetry = Telemetry()
        models = () if start is None else start.models
        on_demand = () if start is None else start.on_demand
        own = {model.name: decode_options(model.batcher_options, BatcherOptions) for model in on_demand}
        self._on_hung = on_hung
        self.links = [
            RemoteBatcher(own.get(name, batcher), partial(_tell_hung, on_hung, place))
            for place, name in enumerate(models or ("",))
        ]
        engines: dict[str, Callee] = dict(zip(models, self.links, strict=False))
        self.keeper: ModelKeeper | None = None
        if start is not None and on_demand:
            self.keeper = ModelKeeper(on_demand, start.model_bytes, own, engines, switch)
        self.batcher: Callee = ServedModels(engines, self.keeper) if engines else self.links[0]
        # If another process has opened the sockets, its engines already run, and clients may already have connected.
        running = self.links[: len(self.links) - len(on_demand)] if sockets is not None else []
        self.listeners = Listeners(
            self.batcher,
            options,
            self.telemetry,
            of_fleet=start is not None and start.of_fleet,
            sockets=sockets,
            joined=[link.joined for link in running],
        )

        def child(place: int) -> ChildSpec:
            return ChildSpec(f"link_{place}", lambda: self.links[place].run)

        keeper = self.keeper
        self.supervisor = Supervisor(
            [
                *map(child, range(len(self.links))),
                *([] if keeper is None else [ChildSpec("keeper", lambda: keeper.run)]),
                self.listeners.child(),
            ],
            strategy="rest_for_one",
            name="gateways",
            telemetry=self.telemetry,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses for clients, once the supervisor has started."""
        return self.listeners.addresses

    def add(self, model: ManagedModel) -> Supervisor:
        """Serve one more model on demand; its link runs under the supervisor that is returned."""
        assert self.keeper is not None and isinstance(self.batcher, ServedModels) and model.engine == len(self.links)
        options = decode_options(model.batcher_options, BatcherOptions)
        link = RemoteBatcher(options, partial(_tell_hung, self._on_hung, model.engine))
        self.links.append(link)
        self.keeper.add(model, options, link)
        self.batcher.add(model.name, link)
        spec = ChildSpec(f"link_{model.engine}", lambda: link.run)
        return Supervisor([spec], name=f"gateways.{model.name}", telemetry=self.telemetry)

    async def join(self, join: Join, hand_over: socket.socket) -> None:
        """Take the end of a new link to an engine."""
        await self.links[join.engine].send(join, hand_over)
        if self.keeper is not None:
            self.keeper.engine_is_ready(join.engine, join.num_bytes)

    async def retire(self, timeout_s: float) -> None:
        """See the function `retire`."""
        await retire(self.listeners, self.batcher, timeout_s)


def _tell_hung(on_hung: Callable[[str, int], None], place: int, reason: str) -> None:
    on_hung(reason, place)


# Memory blocks of at least this size return to the kernel as soon as they are freed.
LARGE_BLOCK_BYTES = 2**18
_M_MMAP_THRESHOLD = -3  # glibc's


def return_large_blocks() -> None:
    """Make glibc return freed large blocks to the kernel; other libraries have no such call.

    By default glibc expects more large messages after it frees the first one. It then places them among small blocks
    that live longer, and cannot return their memory.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def main() -> None:
    """Run until the parent sends Stop, or ends."""
    return_large_blocks()
    allow_files(AMPLE_FILES)
    run_child(lambda channel: GatewayProcess(channel).serve())


class GatewayProcess:
    """The gateway process's work for its parent."""

    def __init__(self, channel: ControlChannel[Any]) -> None:
        self._channel = channel
        self._gateways: LinkedGateways
        self._has_gateways = trio.Event()
        self._nursery: trio.Nursery
        self._sockets: ListeningSockets | None = None  # the parent's sockets, if it has any

    async def serve(self) -> None:
        """Serve until the parent sends Stop or ends, until a drain is complete, or until the gateways fail to start."""
        async with background() as self._nursery:
            self._nursery.start_soon(keep_returning_freed_memory)
            while True:
                match await self._channel.receive():
                    case Listening(kind):
                        self._sockets = self._sockets or ListeningSockets()
                        self._sockets.put(kind, self._channel.take_socket())  # type: ignore[arg-type]  # one of ours
                    case StartGateway() as start:
                        self._nursery.start_soon(self._open, start)
                    case Join() as join:
                        await self._has_gateways.wait()
                        await self._gateways.join(join, self._channel.take_socket())
                    case AddModel(model):
                        await self._has_gateways.wait()
                        await self._nursery.start(self._gateways.add(model).run)
                    case ShowModel(name, is_there):
                        await self._has_gateways.wait()
                        if self._gateways.keeper is not None:
                            self._gateways.keeper.show(name, is_there)
                    case EngineStopped(engine, reason):
                        await self._has_gateways.wait()
                        if self._gateways.keeper is not None:
                            await self._gateways.keeper.engine_has_ended(engine, reason)
                    case DrainAndStop(timeout_s, retires):
                        self._nursery.start_soon(self._drain, timeout_s, retires)
                    case _:
                        return

    async def _open(self, start: StartGateway) -> None:
        """Start the gateways and report the outcome; links to engines may be made meanwhile."""
        try:
            await self._start(start)
        except StartFailed as failed:
            error = failed.__cause__ if isinstance(failed.__cause__, Exception) else failed
        except Exception as raised:
            error = raised
        else:
            set_up_garbage_collection()
            await self._tell(GatewayReady(self._gateways.addresses))
            return
        await self._tell(to_message(error))
        self._nursery.cancel_scope.cancel()

    async def _start(self, start: StartGateway) -> None:
        self._gateways = LinkedGateways(
            decode_options(start.batcher_options, BatcherOptions),
            decode_options(start.service_options, ServiceOptions),
            on_hung=self._tell_hung,
            start=start,
            sockets=self._sockets,
            switch=lambda message: self._nursery.start_soon(self._tell, message),
        )
        self._has_gateways.set()
        await self._nursery.start(observe, self._gateways.telemetry)
        await self._nursery.start(self._gateways.supervisor.run)

    async def _drain(self, timeout_s: float, retires: bool) -> None:
        if retires:
            await self._gateways.retire(timeout_s)
        else:
            await self._gateways.batcher.call(DrainRequest(timeout_s=timeout_s), timeout=None, control=True)
            await trio.sleep(LAST_WORDS_S)
        self._nursery.cancel_scope.cancel()

    def _tell_hung(self, reason: str, engine: int) -> None:
        self._nursery.start_soon(self._tell, Hung(reason, engine))

    async def _tell(self, message: object) -> None:
        with suppress(OSError):  # the parent has ended, which ends this process, too
            await self._channel.send(message)
