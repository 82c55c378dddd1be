"""Replicas as Ray's actors: Ray places them, starts them anew and says which there are; tokens never pass through it.

    replicas = RayReplicas("smollm2", ReplicaOptions(...), address=None)   # a Ray of its own, or one that is there
    await replicas.create(0)
    for name in await replicas.names(): print(await replicas.describe(name))

A replica is a whole service of three processes (ADR 20), started in an actor that Ray restarts for ever. Its name is
`genbatch FLEET SINCE-OPTIONS INDEX`, so that whoever wants replica 3 of a version gets the one that is there, and any
number of gateways can keep one fleet without knowing of one another. A version is when it was first wanted and a digest
of its options: the latest is the one to be served, and the gateways of that one let the others' replicas go.

    gateway --(Ray: our public key)--> ReplicaHost.describe --(Ray: its public key)--> gateway
    gateway ================ ZeroMQ over TCP, CURVE with these keys ================= replica

On a cluster replicas listen on their node's address. Each makes keys at its start, and lets in the gateways that show
it theirs by way of Ray: whoever may call Ray's actors may run anything there anyway. No secret key leaves its process.

Several ranks of a model are several actors in one placement group (`RankedReplica`), so that Ray finds room for all of
them or none; they meet as torchrun's ranks do, and as there all of them are started anew when one ends.
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
# Bytes of Ray's object store on a Ray of our own: nothing is ever put there.
OBJECT_STORE = 80 * 1024 * 1024
# What the names of replicas' folders begin with.
FOLDER = "genbatch-replica-"
# What an actor says that cannot start, however often it is tried.
NOT_STARTED = "the replica did not start"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """What each replica is.

    Args:
        engine, batcher: as of a service.
        cpus, gpus: what Ray is asked for, for each rank of a replica.
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


class ReplicaHost:
    """The actor: a service in a thread of its own, whose children end with this process.

    Args:
        engine, batcher: the options, encoded.
        is_reachable: whether gateways on other nodes are to reach it; else only those of this machine's user.
        meeting: where its ranks meet, a host and a port, when they are Ray's.
    """

    def __init__(
        self, engine: bytes, batcher: bytes, is_reachable: bool, meeting: tuple[str, int] | None = None
    ) -> None:
        self._engine = decode_options(engine, EngineOptions)
        self._batcher = decode_options(batcher, BatcherOptions)
        self._is_reachable = is_reachable
        self._keys: KeyStore | None = None
        # Ranks of Ray's are started anew all together, by their end.
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
        """The fields of Described; the gateway with this key is let in."""
        server_key = None
        if self._keys is not None:
            server_key = read_public_key(str(self._keys.server_key))
            if public_key not in read_authorised(self._keys.directory / "authorised"):
                self._keys.authorise(f"gateway-{hashlib.sha256(public_key.encode()).hexdigest()[:16]}", public_key)
        pids = (os.getpid(), self._processes.gateway.pid, self._processes.engine.pid)
        return self._life, self._processes.addresses[0], tuple(pid for pid in pids if pid is not None), server_key

    def join(self) -> None:
        """Returns never: who waits for it sees the actor's end."""
        threading.Event().wait()

    def _run(self) -> None:
        from genbatch.actors.service.processes import open_processes

        # No method: one that is asynchronous would make this an actor of asyncio's, whose calls wait for one another.
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
            if self._ready.is_set():  # it has served, and gives up: Ray is to start another
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
    """A folder for a replica's sockets and keys; removes those of replicas that were killed."""
    for other in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        # Whoever lives holds the lock of its folder; others' folders, and one that is being made, are left alone.
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
    """The actor of a rank that is not the first."""

    def run(self, engine: bytes, rank: int, meeting: tuple[str, int]) -> None:
        """Follows rank 0 until that is gone."""
        from genbatch.nif.context.tensor_parallel import follow

        options = decode_options(engine, EngineOptions)
        _be_rank(rank, options.tensor_parallel, meeting)
        try:
            follow(options, rank)
        except NativeError as error:
            raise RuntimeError(f"{NOT_STARTED}: rank {rank}: {error}") from error
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # what a backend's threads wait for will not come


class RankedReplica:
    """The actor that stands for a replica of several ranks: its placement group and its ranks end with it.

    Args:
        bundle: what Ray is asked for, for each rank.
        others: as of ReplicaHost.
    """

    def __init__(self, engine: bytes, batcher: bytes, is_reachable: bool, bundle: dict[str, float]) -> None:
        import ray
        from ray.util.placement_group import placement_group

        size = decode_options(engine, EngineOptions).tensor_parallel
        self._ray: Any = ray
        name = ray.get_runtime_context().get_actor_name()
        with suppress(ValueError):  # the group of this actor's last life would keep its place
            ray.util.remove_placement_group(ray.util.get_placement_group(name))
        self._group = placement_group([bundle] * size, strategy="PACK", name=name)
        ray.get(self._group.ready())
        meeting = ray.get(self._at(0, ray.remote(free_address)).remote())
        # Rank 0 is ready when it has met the others, which are therefore begun first.
        ranks = [self._at(rank, ray.remote(RankHost), bundle).remote() for rank in range(1, size)]
        ends = [host.run.remote(engine, rank, meeting) for rank, host in enumerate(ranks, start=1)]
        self._ranks = ranks
        self._host = self._at(0, ray.remote(ReplicaHost), bundle, max_concurrency=3).remote(
            engine, batcher, is_reachable, meeting
        )
        ready = self._host.__ray_ready__.remote()
        first, _ = ray.wait([ready, *ends], num_returns=1)
        ray.get(first)  # raises what kept a rank from starting
        ends.append(self._host.join.remote())
        threading.Thread(target=self._end_with, args=(ends,), daemon=True).start()

    def describe(self, public_key: str) -> tuple[str, str, tuple[int, ...], str | None]:
        """See ReplicaHost."""
        described: tuple[str, str, tuple[int, ...], str | None]
        described = self._ray.get(self._host.describe.remote(public_key))
        return described

    def placed(self) -> list[str]:
        """The node of each rank, by rank."""
        nodes = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [nodes[rank] for rank in sorted(nodes)]

    def _at(self, rank: int, remote: Any, bundle: dict[str, float] | None = None, **options: Any) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        wanted = {"num_cpus": 0.0} if bundle is None else {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        return remote.options(scheduling_strategy=place, **wanted, **options)

    def _end_with(self, ends: Sequence[Any]) -> None:
        """A rank that ends takes all along; Ray starts this actor anew."""
        self._ray.wait(list(ends), num_returns=1)
        os._exit(1)


def free_address() -> tuple[str, int]:
    """This node's address and a port of it that nobody uses."""
    host = _node_address()
    with socket.create_server((host, 0)) as probe:
        return host, probe.getsockname()[1]


def _node_address() -> str:
    address: str = import_module("ray").util.get_node_ip_address()
    return address


def _be_rank(rank: int, size: int, meeting: tuple[str, int]) -> None:
    """As torchrun tells its processes; each of Ray's sees its own GPUs alone."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": str(meeting[1]),
    }


class RayReplicas:
    """Makes, finds and ends replicas. Everything that asks Ray runs on a thread, as Ray's interface blocks.

    Args:
        fleet: its name; gateways that say the same name share its replicas.
        options: of the replicas that are made from here.
        address: of the Ray to join; None joins the one of this machine, or starts one that ends with this process;
            "local" starts one whatever there is.

    Raises:
        RayUnavailable: there is no Ray.
    """

    def __init__(self, fleet: str, options: ReplicaOptions, address: str | None) -> None:
        self.fleet, self.options = fleet.replace(" ", "_"), options
        try:
            self._ray: Any = import_module("ray")
        except ImportError as error:
            raise RayUnavailable(f"replicas need Ray; {how_to_install('ray')}") from error
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told that it runs
        settings: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
        try:
            # Replicas outlive a gateway only on a cluster that outlives it, too; and only there are there other nodes.
            self._is_cluster = (
                address not in (None, "local") if self._ray.is_initialized() else self._join(address, settings)
            )
            if not self._ray.is_initialized():
                self._ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE, **settings)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise RayUnavailable(f"no Ray at {address or 'this machine'}: {error}") from error
        self._lifetime = "detached" if self._is_cluster else None
        self._keys = KeyPair(*zmq.curve_keypair())
        self._held: dict[str, Any] = {}
        self._version = ""

    def _join(self, address: str | None, settings: dict[str, Any]) -> bool:
        """Joins the Ray at this address, or of this machine; whether there is one.

        Raises:
            ConnectionError: there is none where there should be.
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
        """Finds the version of our options among those that are there, or makes them a new one, the latest."""
        theirs = {_version_and_index(name)[0] for name in await self.names()}
        ours = [version for version in theirs if version.endswith(f"-{self.options.digest}")]
        self._version = max(ours) if ours else new_version(theirs, self.options.digest)

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
        # Without the cluster's own lifetime a replica lives for as long as somebody holds it.
        self._held[name] = await _on_thread(partial(host.remote, *arguments))
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
        """The way to a replica."""
        server = described.server_key
        keys = None if server is None else ClientKeys(server.encode(), self._keys)
        return ReplicaConnection(ZeroMQTransport(described.address, keys))

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


def new_version(others: Collection[str], digest: str) -> str:
    """A version that is later than all others, also where the wall clock was set back or another node's is ahead."""
    latest = max((int(version.partition("-")[0]) for version in others), default=0)
    return f"{max(time.time_ns(), latest + 1):020d}-{digest}"


def _version_and_index(name: str) -> tuple[str, int]:
    *_, version, index = name.split(" ")
    return version, int(index)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if NOT_STARTED in line]
    return lines[-1] if lines else str(error)
