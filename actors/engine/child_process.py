"""ChildProcess: a process of this program, from its start to its certain end, and its messages to and from the parent.

    child = ChildProcess("engine", "genbatch.actors.engine.engine_process")
    await child.channel.send(StartEngine(...))
    ...
    await child.end()

In the child, `run_child(serve)` is the main function. The child ends with its parent: the channel closes, and on Linux
the kernel kills the child.
"""

import array
import ctypes
import gc
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any, Final, Generic, TypeVar, get_type_hints

import msgspec
import trio

from genbatch.actors.observing.observe import LEVEL_VARIABLE, start_logging
from genbatch.actors.runtime.errors import ActorError
from genbatch.actors.scheduling.plan import RehearsedStep
from genbatch.actors.scheduling.scheduler import SchedulerError
from genbatch.actors.security.key_files import AddressError, InsecureBind, KeyFileError
from genbatch.nif.engine_options import sent_fields
from genbatch.nif.errors import ModelError, OptionError
from genbatch.proto.service_messages import Models

T = TypeVar("T")
Ready = TypeVar("Ready")  # a message that a process is ready

_LENGTH: Final = struct.Struct("<I")
_RECEIVE_BYTES = 64 * 2**10
_MAX_SOCKETS = 4  # per read; each comes with one message


class ChannelError(Exception):
    """The other process sent bytes that are not a message."""


class ControlChannel(Generic[T]):
    """One end of the channel between a parent and its child.

    Args:
        end: the socket; it is closed with the channel.
        kind: the type of the messages that arrive here.
    """

    def __init__(self, end: socket.socket, kind: Any) -> None:
        self._socket = trio.socket.from_stdlib_socket(end)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = trio.Lock()
        self._received = bytearray()
        self._sockets: list[socket.socket] = []

    async def send(self, message: object, hand_over: socket.socket | None = None) -> None:
        """Send a message, with a socket to hand over; the socket is then closed on this side.

        Raises:
            OSError: the other process has ended.
        """
        payload = self._encoder.encode(message)
        data = _LENGTH.pack(len(payload)) + payload
        rights = []
        if hand_over is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [hand_over.fileno()]))]
        try:
            async with self._sending:
                # Half a message would corrupt all messages after it, so a cancel must not stop the send.
                with trio.CancelScope(shield=True):
                    sent = await self._socket.sendmsg([data], rights)
                    while sent < len(data):
                        sent += await self._socket.send(data[sent:])
        finally:
            if hand_over is not None:
                hand_over.close()

    async def receive(self) -> T | None:
        """Return the next message; None once the other process has ended.

        Raises:
            ChannelError: the other process sent bytes that are not a message.
        """
        while True:
            payload = self._take()
            if payload is not None:
                try:
                    return self._decoder.decode(payload)
                except msgspec.DecodeError as error:
                    raise ChannelError(str(error)) from error
            try:
                data, ancillary, _, _ = await self._socket.recvmsg(
                    _RECEIVE_BYTES, socket.CMSG_SPACE(_MAX_SOCKETS * array.array("i").itemsize)
                )
            except ConnectionError:
                return None
            self._accept(ancillary)
            if not data:
                return None
            self._received += data

    def take_socket(self) -> socket.socket:
        """Return the socket that came with the last received message."""
        return self._sockets.pop(0)

    def close(self) -> None:
        """Close this end, and the sockets that were not taken."""
        for end in self._sockets:
            end.close()
        self._socket.close()

    def _accept(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                for fd in fds:
                    os.set_inheritable(fd, False)
                    self._sockets.append(socket.socket(fileno=fd))

    def _take(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        payload = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return payload


class AdapterSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter of the previous engine: its name, its directory, and the digest of its files."""

    name: str
    path: str
    digest: str


class StartEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start_engine"):
    """Load the model and run the Batcher.

    Args:
        engine_options, batcher_options: the bytes of `encode_options`.
        adapters: the adapters of the previous engine, in place of the options' adapters. None if there was no previous
            engine, or if its adapters never changed.
        rehearsed: the steps that the previous engine has rehearsed; empty if there was none.
    """

    engine_options: msgspec.Raw
    batcher_options: msgspec.Raw
    adapters: list[AdapterSource] | None = None
    rehearsed: tuple[RehearsedStep, ...] = ()


class PrepareEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prepare_engine"):
    """Import an engine's libraries, and wait for StartEngine.

    Args:
        needs_torch: whether a model runs in torch; native engines do not import it.
    """

    needs_torch: bool


class ManagedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that is loaded on demand.

    Args:
        engine: its engine's index.
        num_bytes: the size of its files; 0 for a model that is not on this machine yet.
        keep_alive: seconds without requests after which it is unloaded; negative for never.
        batcher_options: the bytes of `encode_options`.
        adapters: the names of the adapters that are loaded with it.
        is_there: whether clients see it; False if its files have gone.
    """

    name: str
    engine: int
    num_bytes: int
    keep_alive: float
    batcher_options: msgspec.Raw
    adapters: tuple[str, ...] = ()
    is_there: bool = True


class StartGateway(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start_gateway"):
    """Listen, and serve requests once an engine is connected; the options are the bytes of `encode_options`.

    Args:
        of_fleet: see Dispatcher.
        models: the names of the models of several engines; a link's `engine` is an index into them.
        on_demand: those that are loaded on demand.
        model_bytes: bytes that the models of `on_demand` may take together.
    """

    service_options: msgspec.Raw
    batcher_options: msgspec.Raw
    of_fleet: bool = False
    models: tuple[str, ...] = ()
    on_demand: tuple[ManagedModel, ...] = ()
    model_bytes: int = 0


class AddModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="add_model"):
    """Serve one more model, which is loaded on demand; its engine's index is the number of the engines before it."""

    model: ManagedModel


class ShowModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="show_model"):
    """Show a model on demand to clients, or hide it: its files have gone."""

    name: str
    is_there: bool


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="join"):
    """Connect to the engine through the socket that comes with this message; it replaces the socket before.

    Args:
        number: identifies the link.
        models: the models that the engine serves.
        engine: the engine's index among several.
        num_bytes: the memory that the engine takes.
        was_killed: whether the last engine was killed from outside the service, so that no request is the cause.
    """

    number: int
    models: Models
    engine: int = 0
    num_bytes: int = 0
    was_killed: bool = False


class Listening(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="listening"):
    """Let the gateway of this kind listen with the socket that comes with this message (`ListeningSockets`)."""

    kind: str = msgspec.field(name="door")  # the name that services of earlier versions send and read


class DrainAndStop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="drain_and_stop"):
    """Refuse new requests, end the open requests within `timeout_s` seconds, and stop.

    Args:
        retires: another service has the sockets: serve the connected clients until they leave, within `timeout_s`
            seconds.
    """

    timeout_s: float
    retires: bool = False


class StopNow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="stop"):
    """Stop now; the end of the channel means the same."""


class Loading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="loading"):
    """The progress of loading; see nif's Progress."""

    stage: str
    done: int
    total: int


class NotStarted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start_failed"):
    """An error that ended the process before it was ready.

    Args:
        kind: the name of the error's class.
        message: its text.
        attributes: its attributes of type str.
    """

    kind: str
    message: str
    attributes: dict[str, str]


class EngineReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="engine_ready"):
    """The Batcher runs.

    Args:
        models: the models that it serves.
        stats: the answer to StatsRequest.
        num_bytes: the memory that the process takes.
        rehearsed: the steps that it has rehearsed.
    """

    models: Models
    stats: dict[str, Any]
    num_bytes: int = 0
    rehearsed: tuple[RehearsedStep, ...] = ()


class ServingChanged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="serving_changed"):
    """The models that an engine serves from now on, and the adapters that the next engine must load."""

    models: Models
    adapters: list[AdapterSource]


class GatewayReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="gateway_ready"):
    """Clients can connect at these addresses."""

    addresses: tuple[str, ...]


class Unjoined(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="unjoined"):
    """The engine has closed its end of the link with this number, and is ready for the next link."""

    number: int


class Hung(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hung"):
    """The engine makes no progress or breaks the protocol: the parent must kill it."""

    reason: str
    engine: int = 0


class SwitchEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="switch_engine"):
    """Start the engine of a model that is loaded on demand, or end it."""

    engine: int
    is_wanted: bool


class EngineStopped(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="engine_stopped"):
    """The engine of a model on demand has ended; `reason` is "" if the keeper ended it."""

    engine: int
    reason: str


ToChild = (
    StartEngine
    | PrepareEngine
    | Listening
    | StartGateway
    | AddModel
    | ShowModel
    | Join
    | EngineStopped
    | DrainAndStop
    | StopNow
)
FromChild = Loading | NotStarted | EngineReady | ServingChanged | GatewayReady | Unjoined | Hung | SwitchEngine


class ProcessFailed(ActorError):
    """A process ended before it was ready; its standard error has the reason."""


class ProcessDied(ActorError):
    """A process that was ready has ended."""

    def __init__(self, name: str, returncode: int) -> None:
        how = f"was killed by signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}"
        super().__init__(f"the {name} process {how}")
        self.returncode = returncode


_CLASSES: dict[str, type[Exception]] = {
    known.__name__: known
    for known in (ModelError, OptionError, SchedulerError, AddressError, InsecureBind, KeyFileError)
}


def to_message(error: Exception) -> NotStarted:
    """Return the message for an error."""
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, str)}
    return NotStarted(type(error).__name__, str(error), attributes)


def to_error(message: NotStarted) -> Exception:
    """Return the error of a message: its class, text and str attributes. An unknown class becomes ProcessFailed."""
    kind = _CLASSES.get(message.kind)
    if kind is None:
        return ProcessFailed(f"{message.kind}: {message.message}")
    error = kind.__new__(kind)
    Exception.__init__(error, message.message)
    vars(error).update(message.attributes)
    return error


# Fields that may also hold an object, with the type that can be sent.
_SENT_AS: dict[str, Any] = {"scheduler": str}


def encode_options(options: Any) -> msgspec.Raw:
    """Return the bytes of an options dataclass.

    Raises:
        OptionError: a value is an object that cannot leave this process.
    """
    named = sent_fields(options)
    for name, value in named.items():
        try:
            msgspec.msgpack.encode(value)
        except TypeError as error:
            raise OptionError(name, f"cannot be sent to another process: {error}") from error
    return msgspec.Raw(msgspec.msgpack.encode(named))


def decode_options(data: bytes | msgspec.Raw, kind: Callable[..., T]) -> T:
    """Return the options of the bytes of `encode_options`.

    Raises:
        OptionError: the class has no such option, or a value has a wrong type or is out of range.
    """
    hints = get_type_hints(kind)
    options_class: Any = kind
    names = {field.name for field in fields(options_class) if field.init}
    values: dict[str, Any] = {}
    for name, raw in msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw]).items():
        if name not in names:
            raise OptionError(name, "there is no such option")
        try:
            value = msgspec.msgpack.decode(raw, type=_SENT_AS.get(name, hints[name]))
        except msgspec.ValidationError as error:
            raise OptionError(name, str(error)) from error
        values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


# Seconds from the end of its channel to its exit code; a slower process is killed.
EXIT_S = 1.0


class ChildProcess:
    """Starts `module`'s `main()` in a new interpreter.

    Make it on a thread that lasts as long as the process, since the thread's end would end the process. The constructor
    blocks for some milliseconds, until the interpreter is loaded.

    Args:
        name: for logs.
        module: its main() calls run_child, which reads the arguments.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        with theirs:
            # Fork alone would copy this process's threads and locks. -P keeps the working directory out of the module
            # path, unless this process has it in its path.
            code = f"from {module} import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C reaches only the parent, which then stops it
                # Where our logging was not started, the child logs no more than Python's default.
                env={LEVEL_VARIABLE: "warning", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.channel: ControlChannel[Any] = ControlChannel(ours, FromChild)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True if it has not ended."""
        return self._process.poll() is None

    async def stop(self, message: object) -> bool:
        """Ask it to end; return False if it has already ended."""
        try:
            await self.channel.send(message)
        except OSError:
            return False
        return True

    async def wait_until_ready(
        self, kind: type[Ready], progress: Callable[[str, int, int], None] | None = None
    ) -> Ready:
        """Return the process's message that it is ready.

        Args:
            kind: the type of this message.
            progress: called as progress(stage, done, total) while a model loads.

        Raises:
            ProcessFailed: it ended without a reason. With one, that error is raised.
        """
        while (message := await self.channel.receive()) is not None:
            match message:
                case Loading() if progress is not None:
                    progress(message.stage, message.done, message.total)
                case NotStarted():
                    raise to_error(message)
                case _ if isinstance(message, kind):
                    return message
        code = await self.end(EXIT_S)
        raise ProcessFailed(f"the {self.name} process ended with code {code} before it was ready")

    @asynccontextmanager
    async def ended_with_body(self, grace_s: float) -> AsyncIterator[None]:
        """End the process after the body. If the body is cancelled, the process has `grace_s` seconds to stop."""
        patience_s = 0.0
        try:
            yield
        except trio.Cancelled:
            patience_s = grace_s
            raise
        finally:
            with trio.CancelScope(shield=True):
                if patience_s:
                    await self.stop(StopNow())
                await self.end(patience_s)

    def kill(self) -> None:
        """Send SIGKILL; this has no effect on an ended process."""
        self._process.kill()

    def close(self) -> None:
        """Close the channel of a process that has ended."""
        assert not self.is_running
        self.channel.close()

    async def end(self, grace_s: float = 0.0) -> int:
        """Wait for its end, and kill it after `grace_s` seconds; return its exit code, -n for signal n.

        This method may be called again.
        """
        try:
            if self._process.returncode is None:
                with trio.move_on_after(grace_s):
                    while await self.channel.receive() is not None:  # until it has closed its end
                        pass
                    await trio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
        finally:
            self._process.kill()
            with trio.CancelScope(shield=True):
                code = await trio.to_thread.run_sync(self._process.wait)
            self.channel.close()
        return code


_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; on other systems than Linux the closed sockets end it.

    The kernel watches the parent's thread that started this process, so that thread must last.

    Args:
        parent: the parent's process id, as the parent passed it.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Ignore the signals of a terminal or a service manager: the parent decides when and how to stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


# New objects until the next garbage collection. Python's default is 700, and a step of 256 sequences makes more. Each
# step would scan its tokens and suspended tasks, for 0.1 to 0.2 ms.
NEW_OBJECTS = 5000


def set_up_garbage_collection() -> None:
    """Exclude all current objects from garbage collection, and collect less often; call this once the process is ready.

    These objects live as long as the process. Scanning a model's libraries takes 0.2 s, in which no token is sent.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


logger = logging.getLogger(__name__)


class StartFault(Exception):
    """The process cannot get ready, and its parent must get the error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def run_child(serve: Callable[[ControlChannel[Any]], Awaitable[None]]) -> None:
    """Run `serve` over the channel that ChildProcess has opened, and end the process."""
    leave_signals_to_parent()
    die_with_parent(int(sys.argv[2]))
    start_logging()
    try:
        code = trio.run(_serve, serve, socket.socket(fileno=int(sys.argv[1])))
    except BaseException:
        logger.critical("the process fails", exc_info=True)
        code = 1
    # A hanging step or a load in progress holds a thread, and the interpreter would wait for it.
    logging.shutdown()
    os._exit(code)


async def _serve(serve: Callable[[ControlChannel[Any]], Awaitable[None]], end: socket.socket) -> int:
    channel: ControlChannel[Any] = ControlChannel(end, ToChild)
    try:
        await serve(channel)
    except StartFault as fault:
        await channel.send(to_message(fault.error))
        return 1
    return 0
