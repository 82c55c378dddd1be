"""What callers of a client do wrong, beside the errors that requests end with (genbatch.proto.errors)."""


class ClientError(Exception):
    """Root of these errors."""


class StreamNotEnded(ClientError):
    """The result of a stream was asked for before its last token."""

    def __init__(self) -> None:
        super().__init__("the stream has no result yet: iterate over its tokens first")


class ClientClosed(ClientError):
    """The client was used outside its `with` or `async with` block."""

    def __init__(self) -> None:
        super().__init__("the client is not open: use it inside its with block")
