"""ChildProcess: a process of this program's own, from its start to its certain end, and what it and its parent say.

    child = ChildProcess("engine", "genbatch.actors.engine.engine_process")
    await child.channel.send(StartEngine(...))
    ...
    await child.end()

In the child, `run_child(serve)` is the main function. The child ends with the one that started it: the channel's end
tells it, and on Linux the kernel kills it.
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
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any, Final, Generic, TypeVar, get_type_hints

import msgspec
import trio

from genbatch.actors.observing.observe import LEVEL_VARIABLE, start_logging
from genbatch.actors.runtime.errors import ActorError
from genbatch.actors.scheduling.scheduler import SchedulerError
from genbatch.actors.security.key_files import AddressError, InsecureBind, KeyFileError
from genbatch.nif.errors import ModelError, OptionError
from genbatch.proto.messages import Models

T = TypeVar("T")

_LENGTH: Final = struct.Struct("<I")
_RECEIVE_BYTES = 64 * 2**10
_MAX_SOCKETS = 4  # in one read; each comes with a message of its own


class ChannelError(Exception):
    """The other process sent what is no message."""


class ControlChannel(Generic[T]):
    """One end.

    Args:
        end: is closed with the channel.
        kind: the messages that come here.
    """

    def __init__(self, end: socket.socket, kind: Any) -> None:
        self._socket = trio.socket.from_stdlib_socket(end)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = trio.Lock()
        self._received = bytearray()
        self._sockets: list[socket.socket] = []

    async def send(self, message: object, hand_over: socket.socket | None = None) -> None:
        """Sends a message, and a socket that is closed here once it is there.

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
                # Begun is begun: half a message would make nonsense of those after it.
                with trio.CancelScope(shield=True):
                    sent = await self._socket.sendmsg([data], rights)
                    while sent < len(data):
                        sent += await self._socket.send(data[sent:])
        finally:
            if hand_over is not None:
                hand_over.close()

    async def receive(self) -> T | None:
        """The next message; None once the other process has ended.

        Raises:
            ChannelError: it sent something else.
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
        """The socket that came with the message received last."""
        return self._sockets.pop(0)

    def close(self) -> None:
        """Closes this end, and sockets that nobody took."""
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
    """An adapter that an engine had: its name, its directory, and the digest of what was in that."""

    name: str
    path: str
    digest: str


class StartEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start_engine"):
    """Load the model and run the Batcher.

    Args:
        engine_options, batcher_options: as `encode_options` makes them.
        adapters: those that the engine before had, in the place of the options'; None: there was none before, or none
            were loaded and unloaded.
    """

    engine_options: msgspec.Raw
    batcher_options: msgspec.Raw
    adapters: list[AdapterSource] | None = None


class PrepareEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prepare_engine"):
    """Import an engine's libraries, and wait for StartEngine."""


class StartGateway(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start_gateway"):
    """Listen, and work on what comes once there is an engine; the options as `encode_options` makes them.

    Args:
        of_fleet: see Dispatcher.
        models: the names of the models, where there are several engines; a link's `engine` counts in their order.
    """

    service_options: msgspec.Raw
    batcher_options: msgspec.Raw
    of_fleet: bool = False
    models: tuple[str, ...] = ()


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="join"):
    """The socket that comes with this message leads to the other process; it replaces the one before.

    Args:
        number: names the link.
        models: what the engine serves.
        engine: which one of several it is.
    """

    number: int
    models: Models
    engine: int = 0


class Listening(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="listening"):
    """The socket that comes with this message listens for a door of the service (`ListeningSockets`)."""

    door: str


class DrainAndStop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="drain_and_stop"):
    """Take no new requests, end those there are within `timeout_s` seconds, and stop.

    Args:
        retires: another service has the sockets: clients that are connected are served until they have gone, within
            `timeout_s` seconds.
    """

    timeout_s: float
    retires: bool = False


class StopNow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="stop"):
    """Stop now; so does the end of the channel."""


class Loading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="loading"):
    """See nif's Progress."""

    stage: str
    done: int
    total: int


class NotStarted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start_failed"):
    """An error that ended the process before it was ready.

    Args:
        kind: the error's class.
        message: its text.
        attributes: those that are text.
    """

    kind: str
    message: str
    attributes: dict[str, str]


class EngineReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="engine_ready"):
    """The Batcher runs.

    Args:
        models: what it serves.
        stats: the answer to StatsRequest.
    """

    models: Models
    stats: dict[str, Any]


class ServingChanged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="serving_changed"):
    """What an engine serves from now on, and what the next one is to load for it."""

    models: Models
    adapters: list[AdapterSource]


class GatewayReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="gateway_ready"):
    """Clients can connect at these addresses."""

    addresses: tuple[str, ...]


class Unjoined(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="unjoined"):
    """The engine's end of the link with this number is closed, and the engine is there for the next."""

    number: int


class Hung(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hung"):
    """The engine does not get on with its work, or talks nonsense: it is to be killed."""

    reason: str
    engine: int = 0


ToChild = StartEngine | PrepareEngine | Listening | StartGateway | Join | DrainAndStop | StopNow
FromChild = Loading | NotStarted | EngineReady | ServingChanged | GatewayReady | Unjoined | Hung


class ProcessFailed(ActorError):
    """A process ended before it was ready; its standard error tells more."""


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
    """The error as it travels."""
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, str)}
    return NotStarted(type(error).__name__, str(error), attributes)


def to_error(message: NotStarted) -> Exception:
    """The error with its class, its text and the attributes that are text; ProcessFailed where the class is another."""
    kind = _CLASSES.get(message.kind)
    if kind is None:
        return ProcessFailed(f"{message.kind}: {message.message}")
    error = kind.__new__(kind)
    Exception.__init__(error, message.message)
    vars(error).update(message.attributes)
    return error


# Fields that may also hold an object, and what of them can be sent.
_SENT_AS: dict[str, Any] = {"scheduler": str}


def encode_options(options: Any) -> msgspec.Raw:
    """The bytes of an options dataclass.

    Raises:
        OptionError: a value is an object of this process only.
    """
    named = {field.name: getattr(options, field.name) for field in fields(options) if field.init}
    for name, value in named.items():
        try:
            msgspec.msgpack.encode(value)
        except TypeError as error:
            raise OptionError(name, f"cannot be sent to another process: {error}") from error
    return msgspec.Raw(msgspec.msgpack.encode(named))


def decode_options(data: bytes | msgspec.Raw, kind: Callable[..., T]) -> T:
    """The options that `encode_options` sent.

    Raises:
        OptionError: a name or a type is not the class's, or a value is out of range.
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


# Seconds from the end of its channel to its exit code; what takes longer is killed.
EXIT_S = 1.0


class ChildProcess:
    """Starts `module`'s `main()` in a new interpreter.

    Must be made on a thread that lasts as long as the process: its end would end the process. It blocks until the
    interpreter is loaded, some milliseconds.

    Args:
        name: for logs.
        module: its main() calls run_child, which knows the arguments.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        with theirs:
            # Not fork alone: threads and locks of this process must not be copied. -P: no module is to be found in
            # whatever directory this is run in, unless it can be found there from here.
            code = f"from {module} import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for us, who then stop it
                # Where nobody has started our logging, it says no more than Python's does.
                env={LEVEL_VARIABLE: "warning", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.channel: ControlChannel[Any] = ControlChannel(ours, FromChild)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    async def stop(self, message: object) -> bool:
        """Tells it to end; returns whether it was still there to be told."""
        try:
            await self.channel.send(message)
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL; fine if it has ended."""
        self._process.kill()

    def close(self) -> None:
        """Closes the channel of a process that has ended."""
        assert not self.is_running
        self.channel.close()

    async def end(self, grace_s: float = 0.0) -> int:
        """Waits for its end, kills it after `grace_s` seconds; returns its exit code, -n for signal n.

        May be called again.
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
    """Has the kernel kill this process when its parent ends; elsewhere than on Linux its sockets' ends must do.

    The kernel means the parent's thread that started this process: that must be one that lasts.

    Args:
        parent: the parent's process id, which it knew before this process could ask.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the kernel was told
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Ignores what a terminal or a service manager sends to all processes: the parent says when to stop, and how."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def keep_for_good() -> None:
    """To be called once a process is ready: what was made until then is not looked through for garbage any more.

    It lives as long as the process. A look through a model's libraries takes 0.2 s, in which no token would leave.
    """
    gc.collect()
    gc.freeze()


logger = logging.getLogger(__name__)


class StartFault(Exception):
    """The process does not get ready, and whoever started it is to be told why."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def run_child(serve: Callable[[ControlChannel[Any]], Awaitable[None]]) -> None:
    """Runs `serve` over the channel that ChildProcess has opened, and ends the process."""
    leave_signals_to_parent()
    die_with_parent(int(sys.argv[2]))
    start_logging()
    try:
        code = trio.run(_serve, serve, socket.socket(fileno=int(sys.argv[1])))
    except BaseException:
        logger.critical("the process fails", exc_info=True)
        code = 1
    # A step that hangs, or a load that goes on, holds a thread that the interpreter would wait for.
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
