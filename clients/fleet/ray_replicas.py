"""Replicas as Ray's actors: Ray places, restarts and lists them. Tokens never pass through Ray.

    replicas = RayReplicas("smollm2", ReplicaOptions(...), address=None)   # joins this machine's Ray or starts one
    await replicas.create(0)
    for name in await replicas.names(): print(await replicas.describe(name))

A replica is a whole service of three processes (ADR 20), started in an actor that Ray restarts for ever. The actor's
name is `genbatch FLEET SINCE-OPTIONS INDEX`. So every gateway finds replica 3 of a version by its name, and any number
of gateways can run one fleet without knowing one another. A version is the time of its first use and a digest of its
options. The latest version is served; its gateways drain the replicas of earlier versions.

    gateway --(Ray: our public key)--> ReplicaHost.describe --(Ray: its public key)--> gateway
    gateway ================ ZeroMQ over TCP, CURVE with these keys ================= replica

On a cluster, replicas listen on their node's address. Each replica makes keys at its start. A replica accepts gateways
that pass their public keys through Ray. This adds no risk: a caller of Ray's actors can run any code there already. No
secret key leaves its process.

The ranks of a model are actors in one placement group (`RankedReplica`), so that Ray finds room for all of them or
none. The ranks meet as torchrun's ranks do. As with torchrun, all ranks restart when one ends.
"""

import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import trio
import zmq

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.engine.child_process import decode_options, encode_options
from genbatch.actors.security.curve_keys import ClientKeys, KeyPair, KeyStore, read_authorised, read_public_key
from genbatch.actors.service.options import ServiceOptions
from genbatch.clients.fleet.replicas import Described, RayUnavailable, ReplicaConnection
from genbatch.clients.transports import ZeroMQTransport
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import NativeError, how_to_install

NAMESPACE = "genbatch"
# Bytes of the object store of a Ray that we start; we store nothing there.
OBJECT_STORE = 80 * 1024 * 1024
# The prefix of the names of replicas' folders.
FOLDER = "genbatch-replica-"
# The beginning of the error of an actor that no restart can help.
NOT_STARTED = "the replica did not start"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """The options of a fleet's replicas.

    Args:
        engine, batcher: the options of a service.
        cpus, gpus: the resources to reserve from Ray for each rank of a replica.
    """

    engine: EngineOptions
    batcher: BatcherOptions
    cpus: float = 1.0
    gpus: float = 0.0

    @property
    def digest(self) -> str:
        """Return a digest of the options."""
        plain = bytes(encode_options(self.engine)) + bytes(encode_options(self.batcher))
        return hashlib.sha256(plain).hexdigest()[:8]


class ReplicaHost:
    """The actor of a replica: it runs a service in a thread of its own. The service's children end with this process.

    Args:
        engine, batcher: the encoded options.
        is_reachable: whether gateways on other nodes can connect; otherwise only those of this machine's user.
        meeting: the host and port where Ray's ranks meet; None for a replica without such ranks.
    """

    def __init__(
        self, engine: bytes, batcher: bytes, is_reachable: bool, meeting: tuple[str, int] | None = None
    ) -> None:
        self._engine = decode_options(engine, EngineOptions)
        self._batcher = decode_options(batcher, BatcherOptions)
        self._is_reachable = is_reachable
        self._keys: KeyStore | None = None
        # Ray restarts all ranks together, so a rank must not restart its engine alone.
        self._max_restarts = ServiceOptions().max_restarts if meeting is None else 0
        if meeting is not None:
            _be_rank(0, self._engine.tensor_parallel, meeting)
        self._ready = threading.Event()
        self._life = uuid.uuid4().hex
        self._processes: Any = None
        self._fault: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()
        self._ready.wait()
        if self._fault is not None:
            raise RuntimeError(f"{NOT_STARTED}: {self._fault}") from self._fault

    def describe(self, public_key: str) -> tuple[str, str, tuple[int, ...], str | None]:
        """Return the fields of Described, and authorise the gateway with this key."""
        server_key = None
        if self._keys is not None:
            server_key = read_public_key(str(self._keys.server_key))
            if public_key not in read_authorised(self._keys.directory / "authorised"):
                self._keys.authorise(f"gateway-{hashlib.sha256(public_key.encode()).hexdigest()[:16]}", public_key)
        pids = (os.getpid(), self._processes.gateway.pid, self._processes.engine.pid)
        return self._life, self._processes.addresses[0], tuple(pid for pid in pids if pid is not None), server_key

    def join(self) -> None:
        """Block for ever, so that a caller that waits for this call notices the actor's end."""
        threading.Event().wait()

    def _run(self) -> None:
        from genbatch.actors.service.processes import open_processes

        # This is no method, because an async method would make this an asyncio actor, which serializes its calls.
        async def serve() -> None:
            with own_folder() as folder:
                options = self._listening(folder)
                async with open_processes(self._engine, self._batcher, options, of_fleet=True) as self._processes:
                    self._ready.set()
                    await trio.sleep_forever()

        try:
            trio.run(serve)
        except BaseException as fault:
            self._fault = fault
            if self._ready.is_set():  # the service ran and failed, so Ray must restart the actor
                os._exit(1)
            self._ready.set()

    def _listening(self, directory: Path) -> ServiceOptions:
        bind, keys = f"ipc://{directory}/zeromq.sock", None
        if self._is_reachable:
            self._keys = KeyStore(directory / "keys")
            self._keys.new_server()
            bind, keys = f"tcp://{_node_address()}:*", str(self._keys.directory)
        return ServiceOptions(bind=bind, keys=keys, engine="process", max_restarts=self._max_restarts)


@contextmanager
def own_folder() -> Iterator[Path]:
    """Create a folder for a replica's sockets and keys; removes the folders of killed replicas."""
    for other in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        # A live replica holds its folder's lock. Folders of other users and unfinished folders raise OSError and stay.
        with suppress(OSError), (other / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other)
    with tempfile.TemporaryDirectory(prefix=FOLDER) as name:
        folder = Path(name)
        with (folder / "new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "new").rename(folder / "lock")
            yield folder


class RankHost:
    """The actor of a rank other than rank 0."""

    def run(self, engine: bytes, rank: int, meeting: tuple[str, int]) -> None:
        """Follow rank 0 until rank 0 is gone."""
        from genbatch.nif.context.tensor_parallel import follow

        options = decode_options(engine, EngineOptions)
        _be_rank(rank, options.tensor_parallel, meeting)
        try:
            follow(options, rank)
        except NativeError as error:
            raise RuntimeError(f"{NOT_STARTED}: rank {rank}: {error}") from error
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # a backend's threads may wait for ever


class RankedReplica:
    """The actor of a replica with several ranks; its placement group and its ranks end with this actor.

    Args:
        engine, batcher, is_reachable: see ReplicaHost.
        bundle: the resources to reserve from Ray for each rank.
    """

    def __init__(self, engine: bytes, batcher: bytes, is_reachable: bool, bundle: dict[str, float]) -> None:
        import ray
        from ray.util.placement_group import placement_group

        size = decode_options(engine, EngineOptions).tensor_parallel
        self._ray: Any = ray
        name = ray.get_runtime_context().get_actor_name()
        with suppress(ValueError):  # a group of this actor's earlier run would keep its resources
            ray.util.remove_placement_group(ray.util.get_placement_group(name))
        self._group = placement_group([bundle] * size, strategy="PACK", name=name)
        ray.get(self._group.ready())
        meeting = ray.get(self._at(0, ray.remote(free_address)).remote())
        # Start the other ranks first, because rank 0 becomes ready only after it has met them.
        ranks = [self._at(rank, ray.remote(RankHost), bundle).remote() for rank in range(1, size)]
        ends = [host.run.remote(engine, rank, meeting) for rank, host in enumerate(ranks, start=1)]
        self._ranks = ranks
        self._host = self._at(0, ray.remote(ReplicaHost), bundle, max_concurrency=3).remote(
            engine, batcher, is_reachable, meeting
        )
        ready = self._host.__ray_ready__.remote()
        first, _ = ray.wait([ready, *ends], num_returns=1)
        ray.get(first)  # raises the error of a rank that did not start
        ends.append(self._host.join.remote())
        threading.Thread(target=self._end_with, args=(ends,), daemon=True).start()

    def describe(self, public_key: str) -> tuple[str, str, tuple[int, ...], str | None]:
        """See ReplicaHost."""
        described: tuple[str, str, tuple[int, ...], str | None]
        described = self._ray.get(self._host.describe.remote(public_key))
        return described

    def placed(self) -> list[str]:
        """Return each rank's node, in the order of ranks."""
        nodes = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [nodes[rank] for rank in sorted(nodes)]

    def _at(self, rank: int, remote: Any, bundle: dict[str, float] | None = None, **options: Any) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        resources = {"num_cpus": 0.0}
        if bundle is not None:
            resources = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        return remote.options(scheduling_strategy=place, **resources, **options)

    def _end_with(self, ends: Sequence[Any]) -> None:
        """End this process when a rank ends; Ray then restarts this actor and all ranks."""
        self._ray.wait(list(ends), num_returns=1)
        os._exit(1)


def free_address() -> tuple[str, int]:
    """Return this node's address and one of its free ports."""
    host = _node_address()
    with socket.create_server((host, 0)) as probe:
        return host, probe.getsockname()[1]


def _node_address() -> str:
    address: str = import_module("ray").util.get_node_ip_address()
    return address


def _be_rank(rank: int, size: int, meeting: tuple[str, int]) -> None:
    """Set torchrun's environment variables. LOCAL_RANK is 0, because each of Ray's processes sees only its own GPUs."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": str(meeting[1]),
    }


_OWN_RAY = (
    "it started Ray itself, which ends with it and with the replicas; run `ray start --head`, and start both services "
    "with --ray-address"
)


class RayReplicas:
    """Creates, finds and ends replicas. Calls to Ray run on a thread, because Ray's interface blocks.

    Args:
        fleet: the fleet's name; gateways with the same name share its replicas.
        options: the options of new replicas.
        address: the Ray to join. None joins this machine's Ray, or starts one that ends with this process.
            "local" always starts a new Ray.

    Attributes:
        take_over_refusal: why no other gateway can take the place of this process; "" if one can.

    Raises:
        RayUnavailable: Ray is not installed or cannot be reached.
    """

    def __init__(self, fleet: str, options: ReplicaOptions, address: str | None) -> None:
        self.fleet, self.options = fleet.replace(" ", "_"), options
        try:
            self._ray: Any = import_module("ray")
        except ImportError as error:
            raise RayUnavailable(f"replicas need Ray; {how_to_install('ray')}") from error
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # disable Ray's usage reports
        settings: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
        try:
            # Only on a cluster do replicas outlive a gateway, and only a cluster has other nodes.
            self._is_cluster = (
                address not in (None, "local") if self._ray.is_initialized() else self._join(address, settings)
            )
            if not self._ray.is_initialized():
                self._ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE, **settings)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise RayUnavailable(f"no Ray at {address or 'this machine'}: {error}") from error
        self._lifetime = "detached" if self._is_cluster else None
        self.take_over_refusal = "" if self._is_cluster else _OWN_RAY
        self._keys = KeyPair(*zmq.curve_keypair())
        self._handles: dict[str, Any] = {}
        self._version = ""

    def _join(self, address: str | None, settings: dict[str, Any]) -> bool:
        """Join the Ray at this address, or this machine's Ray; returns whether a Ray was joined.

        Raises:
            ConnectionError: there is no Ray at the given address.
        """
        if address == "local":
            return False
        try:
            self._ray.init(address=address or "auto", **settings)
        except ConnectionError:
            if address is not None:
                raise
            return False
        return True

    async def settle(self) -> None:
        """Find the existing version of our options, or create a new version, which becomes the latest."""
        theirs = {_version_and_index(name)[0] for name in await self.names()}
        ours = [version for version in theirs if version.endswith(f"-{self.options.digest}")]
        self._version = max(ours) if ours else new_version(theirs, self.options.digest)

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of this fleet's replicas."""
        return f"{NAMESPACE} {self.fleet} "

    def name_of(self, index: int) -> str:
        """Return the name of a replica of our version."""
        return f"{self.prefix}{self._version} {index}"

    def is_ours(self, name: str) -> bool:
        """Return whether a replica has this gateway's version."""
        return name.startswith(f"{self.prefix}{self._version} ")

    def is_superseded(self, names: list[str]) -> bool:
        """Return whether a later version than this gateway's exists."""
        return any(_version_and_index(name)[0] > self._version for name in names)

    async def names(self) -> list[str]:
        """List the fleet's replicas of all versions, by version and index."""
        actors = await _on_thread(partial(self._ray.util.list_named_actors, all_namespaces=False))
        return sorted((name for name in actors if name.startswith(self.prefix)), key=_version_and_index)

    async def create(self, index: int) -> str:
        """Create the replica with this index unless it exists; does not wait until the replica is ready."""
        name = self.name_of(index)
        engine, batcher = bytes(encode_options(self.options.engine)), bytes(encode_options(self.options.batcher))
        arguments: list[Any] = [engine, batcher, self._is_cluster]
        resources = {"num_cpus": self.options.cpus, "num_gpus": self.options.gpus}
        kind: type[Any] = ReplicaHost
        if self.options.engine.tensor_parallel > 1:
            bundle = {"CPU": self.options.cpus} | ({"GPU": self.options.gpus} if self.options.gpus else {})
            kind, resources, arguments = RankedReplica, {"num_cpus": 0.0}, [*arguments, bundle]
        host = self._ray.remote(kind).options(
            name=name,
            namespace=NAMESPACE,
            lifetime=self._lifetime,
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=2,
            **resources,
        )
        # Keep a handle: without a detached lifetime an actor ends with its last handle.
        self._handles[name] = await _on_thread(partial(host.remote, *arguments))
        return name

    async def describe(self, name: str, timeout_s: float) -> Described | None:
        """Wait until the replica is ready and return its description; None after `timeout_s`, or if it is gone.

        Raises:
            RayUnavailable: the replica cannot start; the message gives the reason.
        """

        def ask() -> Described | None:
            exceptions = self._ray.exceptions
            try:
                host = self._ray.get_actor(name, namespace=NAMESPACE)
                return Described(*self._ray.get(host.describe.remote(self._keys.public.decode()), timeout=timeout_s))
            except exceptions.ActorDiedError as error:
                if NOT_STARTED in str(error):
                    raise RayUnavailable(_last_line(error)) from error
                return None
            except (ValueError, exceptions.RayActorError, exceptions.GetTimeoutError):
                return None

        described: Described | None = await _on_thread(ask)
        return described

    def connect(self, described: Described) -> ReplicaConnection:
        """Make a connection to a replica."""
        server = described.server_key
        keys = None if server is None else ClientKeys(server.encode(), self._keys)
        return ReplicaConnection(ZeroMQTransport(described.address, keys))

    async def end(self, name: str) -> None:
        """End a replica for good."""

        def kill() -> None:
            with suppress(ValueError):  # the actor is gone
                self._ray.kill(self._ray.get_actor(name, namespace=NAMESPACE), no_restart=True)

        await _on_thread(kill)
        self._handles.pop(name, None)

    def close(self) -> None:
        """Disconnect from Ray. A Ray that we started ends with all its replicas."""
        self._ray.shutdown()


async def _on_thread(work: Any) -> Any:
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True)


def new_version(others: Collection[str], digest: str) -> str:
    """Return a version that sorts after all others, even if the wall clock was set back or another node's is ahead."""
    latest = max((int(version.partition("-")[0]) for version in others), default=0)
    return f"{max(time.time_ns(), latest + 1):020d}-{digest}"


def _version_and_index(name: str) -> tuple[str, int]:
    *_, version, index = name.split(" ")
    return version, int(index)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if NOT_STARTED in line]
    return lines[-1] if lines else str(error)
