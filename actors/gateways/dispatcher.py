"""Dispatcher: what the methods of the service do. Knows neither sockets nor bytes, so every gateway has the same ones.

    dispatcher = Dispatcher(batcher)
    result = await dispatcher.call("generate", {"prompt": "Hello"}, client="zeromq:0a1b", on_token=None)

Cancelling the task that waits here cancels the request.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from genbatch.actors.batching.batcher_messages import Generate, GetStats
from genbatch.actors.runtime.errors import ActorDown, CallTimeout, MailboxFull
from genbatch.actors.runtime.ref import ActorRef
from genbatch.proto.codec import to_generate_request, to_no_params
from genbatch.proto.errors import EngineError, GenbatchError, QueueFull, Unavailable, UnknownMethod
from genbatch.proto.messages import Token

logger = logging.getLogger(__name__)

OnToken = Callable[[Token], None]
# A restarted Batcher keeps the model in memory and is back about this soon.
RETRY_AFTER_RESTART_MS = 500
# A mailbox is emptied between two steps.
RETRY_AFTER_FULL_MS = 100


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and how tokens get to it: called on the event loop, must not block; None where none are wanted."""

    client: str
    on_token: OnToken | None


@dataclass(frozen=True, slots=True)
class Method:
    """What one method does with its map of parameters; `streams` if tokens come before its result."""

    handler: Callable[[dict[Any, Any], Caller], Awaitable[object]]
    streams: bool = False


class Dispatcher:
    """The table of methods.

    Args:
        batcher: who generates; a registry's ref, so that it may be restarted.
    """

    def __init__(self, batcher: ActorRef) -> None:
        self._batcher = batcher
        self._methods = {
            "generate": Method(self._generate),
            "stream": Method(self._generate, streams=True),
            "stats": Method(self._stats),
        }

    def streams(self, method: str) -> bool:
        """Whether tokens come before the method's result."""
        return method in self._methods and self._methods[method].streams

    async def call(self, method: str, params: dict[Any, Any], *, client: str, on_token: OnToken | None) -> object:
        """Does what the method does and returns its result: a type of proto, or plain data.

        Args:
            method: its name.
            params: as they came, unchecked.
            client: who calls, for fairness and logs.
            on_token: where a streaming method's tokens go; not used by others.

        Raises:
            GenbatchError: every failure, whatever its cause.
        """
        try:
            wanted = self._methods[method]
        except KeyError:
            known = ", ".join(self._methods)
            raise UnknownMethod(f"no method {method[:64]!r}; there are {known}") from None
        try:
            return await wanted.handler(params, Caller(client, on_token if wanted.streams else None))
        except GenbatchError:
            raise
        except MailboxFull as error:
            raise QueueFull("too many messages are waiting", retry_after_ms=RETRY_AFTER_FULL_MS) from error
        except ActorDown as error:
            raise Unavailable("the batcher is not running", retry_after_ms=RETRY_AFTER_RESTART_MS) from error
        except CallTimeout as error:
            raise Unavailable("the batcher does not answer", retry_after_ms=RETRY_AFTER_RESTART_MS) from error
        except Exception as error:
            # Its text may tell a client more than it should know.
            logger.exception("method %s of client %s failed", method, client)
            raise EngineError("the service failed at this call") from error

    async def _generate(self, params: dict[Any, Any], caller: Caller) -> object:
        message = Generate(to_generate_request(params), caller.on_token, caller.client)
        return await self._batcher.call(message, timeout=None)

    async def _stats(self, params: dict[Any, Any], caller: Caller) -> object:
        to_no_params(params)
        return await self._batcher.call(GetStats(), control=True)
