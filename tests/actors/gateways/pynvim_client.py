"""pynvim's msgpack-RPC session, as it comes, against a scripted service; a program, since it wants the main thread.

python pynvim_client.py ADDRESS [leave]
"""

import sys
from typing import Any

from pynvim.msgpack_rpc import socket_session, tcp_session


class StrangeError(Exception):
    """What pynvim makes of an error here."""


def connect(address: str) -> Any:
    transport, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    session = socket_session(rest) if transport == "unix" else tcp_session(host, int(port))
    session.error_wrapper = lambda error: StrangeError(error["code"], error.get("field"))
    if transport != "unix":
        assert "generate" in session.request("hello")["methods"]
    return session


def fails(session: Any, *request: Any) -> tuple[object, ...]:
    try:
        session.request(*request)
    except StrangeError as error:
        return error.args
    raise AssertionError(f"{request} succeeded")


def talk(session: Any) -> None:
    assert session.request("generate", {"prompt": "a b", "max_tokens": 4})["text"] == "ab"
    assert session.request("models")["models"][0]["id"] == "scripted"
    assert session.request("tokenize", {"prompt": "AB"}) == {"token_ids": [1, 65, 66]}
    assert session.request("health")["status"] == "ready"
    assert fails(session, "generate", {"prompt": "a", "temperature": -1}) == ("invalid_request", "temperature")
    assert fails(session, "nvim_command", {}) == ("unknown_method", None)
    assert fails(session, "generate", "a", "b", "c") == ("malformed_message", None)
    assert session.request("stream", {"prompt": "un deux trois"})["text"] == "undeuxtrois"
    tokens = [session.next_message() for _ in range(3)]
    assert [(kind, name, params[1:]) for kind, name, params in tokens] == [
        ("notification", "token", [0, 100, "un"]),
        ("notification", "token", [1, 101, "deux"]),
        ("notification", "token", [2, 102, "trois"]),
    ], tokens
    assert session.request("stream", {"prompt": "a b c"}, {"coalesce": True})["text"] == "abc"
    assert session.next_message()[1] == "tokens"
    session.request("cancel", 77, async_=True)  # of a call that has ended
    assert session.request("stats")["steps"] == 7


def leave(session: Any) -> None:
    """Asks for tokens that do not come, and goes."""
    session._async_session.request("stream", [{"prompt": "hold"}], lambda *_: None)
    assert session.request("stats")["steps"] == 7


session = connect(sys.argv[1])
(leave if "leave" in sys.argv else talk)(session)
session.close()
