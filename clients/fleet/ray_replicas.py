"""Replicas as Ray's actors: Ray places them, starts them anew and says which there are; tokens never pass through it.

    replicas = RayReplicas("smollm2", ReplicaOptions(...), address=None)   # a Ray of its own, or one that is there
    await replicas.create(0)
    for name in await replicas.names(): print(await replicas.describe(name))

A replica is a whole service of three processes (ADR 20), started in an actor that Ray restarts for ever. Its name is
`genbatch FLEET SINCE-OPTIONS INDEX`, so that whoever wants replica 3 of a version gets the one that is there, and any
number of gateways can keep one fleet without knowing of one another. A version is when it was first wanted and a digest
of its options: the latest is the one to be served, and the gateways of that one let the others' replicas go.
"""

import hashlib
import os
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import msgspec
import trio

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import decode_options, encode_options
from genbatch.actors.service.options import ServiceOptions
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError

NAMESPACE = "genbatch"
# Bytes of Ray's object store on a Ray of our own: nothing is ever put there.
OBJECT_STORE = 80 * 1024 * 1024


class RayUnavailable(OptionError):
    """Ray is not installed, or not reachable."""

    def __init__(self, reason: str) -> None:
        super().__init__("replicas", reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """What each replica is.

    Args:
        engine, batcher: as of a service.
        cpus, gpus: what Ray is asked for, a replica.
    """

    engine: EngineOptions
    batcher: BatcherOptions
    cpus: float = 1.0
    gpus: float = 0.0

    @property
    def digest(self) -> str:
        """Another one for other options: a model, its precision, its limits."""
        plain = bytes(encode_options(self.engine)) + bytes(encode_options(self.batcher))
        return hashlib.sha256(plain).hexdigest()[:8]


class Described(msgspec.Struct, frozen=True):
    """What a replica says of itself.

    Args:
        life: another one each time it is started.
        address: where it listens.
        pids: its supervisor's, gateway's and engine's process ids.
    """

    life: str
    address: str
    pids: tuple[int, ...]


class ReplicaHost:
    """The actor: a service in a thread of its own, whose children end with this process."""

    def __init__(self, engine: bytes, batcher: bytes) -> None:
        self._engine = decode_options(engine, EngineOptions)
        self._batcher = decode_options(batcher, BatcherOptions)
        self._ready = threading.Event()
        self._life = uuid.uuid4().hex
        self._processes: Any = None
        self._fault: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()
        self._ready.wait()
        if self._fault is not None:
            raise RuntimeError(f"the replica did not start: {self._fault}") from self._fault

    def describe(self) -> tuple[str, str, tuple[int, ...]]:
        """The fields of Described."""
        pids = (os.getpid(), self._processes.gateway.pid, self._processes.engine.pid)
        return self._life, self._processes.addresses[0], tuple(pid for pid in pids if pid is not None)

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as fault:
            self._fault = fault
            if self._ready.is_set():  # it has served, and gives up: Ray is to start another
                os._exit(1)
            self._ready.set()

    async def _serve(self) -> None:
        from tempfile import TemporaryDirectory

        from genbatch.actors.service.processes import open_processes

        with TemporaryDirectory(prefix="genbatch-replica-") as directory:
            options = ServiceOptions(bind=f"ipc://{directory}/zeromq.sock", engine="process")
            async with open_processes(self._engine, self._batcher, options) as self._processes:
                self._ready.set()
                await trio.sleep_forever()


class RayReplicas:
    """Makes, finds and ends replicas. Everything that asks Ray runs on a thread, as Ray's interface blocks.

    Args:
        fleet: its name; gateways that say the same name share its replicas.
        options: of the replicas that are made from here.
        address: of the Ray to join; None joins the one of this machine, or starts one that ends with this process.

    Raises:
        RayUnavailable: there is no Ray.
    """

    def __init__(self, fleet: str, options: ReplicaOptions, address: str | None) -> None:
        self.fleet, self.options = fleet.replace(" ", "_"), options
        try:
            self._ray: Any = import_module("ray")
        except ImportError as error:
            raise RayUnavailable("replicas need Ray; pip install 'genbatch[ray]'") from error
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told that it runs
        settings: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
        if not self._ray.is_initialized():
            try:
                if address is None:
                    self._ray.init(include_dashboard=False, object_store_memory=OBJECT_STORE, **settings)
                else:
                    self._ray.init(address=address, **settings)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise RayUnavailable(f"no Ray at {address or 'this machine'}: {error}") from error
        # Replicas outlive a gateway only on a cluster that outlives it, too.
        self._lifetime = None if address is None else "detached"
        self._held: dict[str, Any] = {}
        self._version = ""

    async def settle(self) -> None:
        """Finds the version of our options among those that are there, or makes them a new one, the latest."""
        theirs = {_version_and_index(name)[0] for name in await self.names()}
        ours = [version for version in theirs if version.endswith(f"-{self.options.digest}")]
        self._version = max(ours) if ours else f"{time.time_ns():020d}-{self.options.digest}"

    @property
    def prefix(self) -> str:
        """What the names of this fleet's replicas begin with."""
        return f"{NAMESPACE} {self.fleet} "

    def name_of(self, index: int) -> str:
        """The name of a replica of our version."""
        return f"{self.prefix}{self._version} {index}"

    def is_ours(self, name: str) -> bool:
        """Whether a replica of the fleet has the version that is made from here."""
        return name.startswith(f"{self.prefix}{self._version} ")

    def is_superseded(self, names: list[str]) -> bool:
        """Whether there is a later version than the one that is made from here."""
        return any(_version_and_index(name)[0] > self._version for name in names)

    async def names(self) -> list[str]:
        """The fleet's replicas, of all versions, by version and index."""
        found = await _on_thread(partial(self._ray.util.list_named_actors, all_namespaces=False))
        return sorted((name for name in found if name.startswith(self.prefix)), key=_version_and_index)

    async def create(self, index: int) -> str:
        """Makes the replica with this index, unless it is there; does not wait until it is ready."""
        name = self.name_of(index)
        resources = {"num_cpus": self.options.cpus, "num_gpus": self.options.gpus}
        host = self._ray.remote(ReplicaHost).options(
            name=name,
            namespace=NAMESPACE,
            lifetime=self._lifetime,
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=2,
            **resources,
        )
        engine, batcher = bytes(encode_options(self.options.engine)), bytes(encode_options(self.options.batcher))
        # Without the cluster's own lifetime a replica lives for as long as somebody holds it.
        self._held[name] = await _on_thread(partial(host.remote, engine, batcher))
        return name

    async def describe(self, name: str, timeout_s: float) -> Described | None:
        """What the replica says of itself, once it is ready; None if it is not within `timeout_s`, or gone.

        Raises:
            RayUnavailable: it cannot be started; the message says why.
        """

        def ask() -> Described | None:
            exceptions = self._ray.exceptions
            try:
                host = self._ray.get_actor(name, namespace=NAMESPACE)
                return Described(*self._ray.get(host.describe.remote(), timeout=timeout_s))
            except exceptions.ActorDiedError as error:
                if "did not start" in str(error):
                    raise RayUnavailable(_last_line(error)) from error
                return None
            except (ValueError, exceptions.RayActorError, exceptions.GetTimeoutError):
                return None

        described: Described | None = await _on_thread(ask)
        return described

    async def end(self, name: str) -> None:
        """Ends a replica for good."""

        def kill() -> None:
            with suppress(ValueError):  # it is gone
                self._ray.kill(self._ray.get_actor(name, namespace=NAMESPACE), no_restart=True)

        await _on_thread(kill)
        self._held.pop(name, None)

    def close(self) -> None:
        """Leaves Ray; one of our own ends with all its replicas."""
        self._ray.shutdown()


async def _on_thread(work: Any) -> Any:
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True)


def _version_and_index(name: str) -> tuple[str, int]:
    *_, version, index = name.split(" ")
    return version, int(index)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "did not start" in line]
    return lines[-1] if lines else str(error)
