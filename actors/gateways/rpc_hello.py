"""The first message of a client where tokens are asked for: a `hello` request with one, and nothing else is read."""

from collections.abc import Callable

from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import check_type
from genbatch.proto.rpc import Request
from genbatch.proto.rpc_server import ServerConnection
from genbatch.proto.service_messages import HelloRequest

# In whose name the owner of a token calls; None for a token that nobody has.
Authenticate = Callable[[str], str | None]

# Nobody who has not said who they are may make the service hold more.
MAX_HELLO_BYTES = 4096


def read_hello(message: bytes) -> tuple[int | None, str | None]:
    """The msgid and the token of a `hello` request; None for what it has not, or if it is something else."""
    request = ServerConnection(max_calls=1).receive(message)
    if not isinstance(request, Request):
        return None, None
    if request.method != "hello":
        return request.msgid, None
    try:
        hello: HelloRequest = check_type(request.params, HelloRequest)
    except GenbatchError:
        return request.msgid, None
    return request.msgid, hello.token
