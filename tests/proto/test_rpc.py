"""The protocol without sockets: what each message means at either end, and one final for each call."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from genbatch.proto.codec import REQUEST_LIMITS, RESPONSE_LIMITS, why_unsendable
from genbatch.proto.errors import (
    Cancelled,
    FrameTooLarge,
    InvalidRequest,
    MalformedMessage,
    QueueFull,
    from_wire,
)
from genbatch.proto.messages import DrawnTokens, GenerateRequest, Message, Token
from genbatch.proto.rpc import (
    MAX_CREDIT,
    CallAnswered,
    CallFailed,
    CallReceived,
    CancelRequest,
    ClientConnection,
    CreditGranted,
    Heartbeat,
    IllegalEvent,
    Notified,
    Refused,
    ServerConnection,
    StreamOptions,
    TokenReceived,
    TokensReceived,
    token_message,
    tokens_message,
)


def pack(message: Any) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed


def refusal(event: object) -> tuple[int | None, str]:
    """Msgid and code of the reply to a message that was not taken."""
    assert isinstance(event, Refused), event
    kind, msgid, error, result = msgpack.unpackb(event.reply)
    assert (kind, result) == (1, None)
    assert error["code"] == event.error.code
    return msgid, error["code"]


def sent(server: ServerConnection, msgid: int, token: Token) -> bytes | None:
    """The token's message, if it is to be sent."""
    array = server.token(msgid, token)
    return None if array is None else token_message(array)


def token(index: int, text: str = "x", choice: int = 0) -> Token:
    return Token(text=text, token_id=index + 10, index=index, choice=choice)


# The service's end


def test_a_request_becomes_an_event_and_its_result_the_response() -> None:
    server = ServerConnection(max_calls=4)
    assert server.receive(pack([0, 2**64 - 1, "generate", [{"prompt": "x"}]])) == CallReceived(
        2**64 - 1, "generate", {"prompt": "x"}
    )
    assert msgpack.unpackb(server.result(2**64 - 1, {"a": 1})) == [1, 2**64 - 1, None, {"a": 1}]
    assert len(server.calls) == 0


def test_parameters_may_be_left_out() -> None:
    assert ServerConnection(4).receive(pack([0, 1, "stats", []])) == CallReceived(1, "stats", {})


def test_a_token_is_the_documented_notification() -> None:
    server = ServerConnection(4)
    server.receive(pack([0, 5, "stream", [{}]]))
    assert msgpack.unpackb(sent(server, 5, token(0, "héllo")) or b"") == [2, "token", [5, 0, 10, "héllo"]]
    more = Token(text="a", token_id=3, index=0, logprob=-1.5, choice=1)
    assert msgpack.unpackb(sent(server, 5, more) or b"") == [2, "token", [5, 0, 3, "a", {"logprob": -1.5, "choice": 1}]]


def test_a_cancelled_call_yields_no_token_and_still_its_final() -> None:
    server = ServerConnection(4)
    server.receive(pack([0, 5, "stream", [{}]]))
    assert server.receive(pack([2, "cancel", [5]])) == CancelRequest(5)
    assert server.receive(pack([2, "cancel", [5]])) is None
    assert server.token(5, token(0)) is None
    assert msgpack.unpackb(server.error(5, Cancelled("by the client"))) == [
        1,
        5,
        {"code": "cancelled", "message": "by the client"},
        None,
    ]
    assert server.receive(pack([2, "cancel", [5]])) is None  # it crossed the final


def test_a_msgid_in_use_is_refused_without_ending_the_call_that_has_it() -> None:
    server = ServerConnection(4)
    server.receive(pack([0, 5, "stream", [{}]]))
    assert refusal(server.receive(pack([0, 5, "stream", [{}]]))) == (None, "invalid_request")
    assert refusal(server.receive(pack([0, 5, "stream", 3]))) == (None, "invalid_request")
    assert server.token(5, token(0)) is not None
    server.result(5, {})
    assert isinstance(server.receive(pack([0, 5, "stream", [{}]])), CallReceived)


def test_too_many_open_calls_are_refused_with_a_time_to_retry() -> None:
    server = ServerConnection(max_calls=1)
    server.receive(pack([0, 1, "stream", [{}]]))
    event = server.receive(pack([0, 2, "stream", [{}]]))
    assert refusal(event) == (2, "queue_full")
    assert isinstance(event, Refused) and isinstance(event.error, QueueFull) and event.error.retry_after_ms
    server.result(1, {})
    assert isinstance(server.receive(pack([0, 2, "stream", [{}]])), CallReceived)


@pytest.mark.parametrize(
    ("data", "msgid", "code"),
    [
        (b"", None, "malformed_message"),
        (b"\xc1", None, "malformed_message"),
        (pack(5), None, "malformed_message"),
        (pack([]), None, "malformed_message"),
        (pack([0]), None, "malformed_message"),
        (pack([0, 7]), 7, "malformed_message"),
        (pack([0, 7, "generate"]), 7, "malformed_message"),
        (pack([0, 7, "generate", [{}], 1]), 7, "malformed_message"),
        (pack([0, 7, 5, [{}]]), 7, "malformed_message"),
        (pack([0, 7, "generate", {}]), 7, "malformed_message"),
        (pack([0, 7, "stream", [{}, 5]]), 7, "malformed_message"),
        (pack([0, 7, "stream", [{}, {}, {}]]), 7, "malformed_message"),
        (pack([0, 7, "stream", [{}, {"credit": -1}]]), 7, "invalid_request"),
        (pack([0, 7, "stream", [{}, {"credit": True}]]), 7, "invalid_request"),
        (pack([0, 7, "stream", [{}, {"credit": MAX_CREDIT + 1}]]), 7, "invalid_request"),
        (pack([0, 7, "stream", [{}, {"credits": 1}]]), 7, "invalid_request"),
        (pack([2, "credit", [1]]), None, "invalid_request"),
        (pack([2, "credit", [1, 0]]), None, "invalid_request"),
        (pack([2, "credit", [1, 1.5]]), None, "invalid_request"),
        (pack([0, 7, "generate", [5]]), 7, "malformed_message"),
        (pack([0, -7, "generate", [{}]]), None, "malformed_message"),
        (pack([0, "7", "generate", [{}]]), None, "malformed_message"),
        (pack([0, True, "generate", [{}]]), None, "malformed_message"),
        (pack([0, 7.0, "generate", [{}]]), None, "malformed_message"),
        (pack([0, None, "generate", [{}]]), None, "malformed_message"),
        (pack([False, 7, "generate", [{}]]), None, "malformed_message"),
        (pack([3, 7, "generate", [{}]]), None, "malformed_message"),
        (pack([2, 5, []]), None, "malformed_message"),
        (pack([2, "cancel", 5]), None, "malformed_message"),
        (pack([2, "cancel", ["5"]]), None, "invalid_request"),
        (pack([2, "cancel", []]), None, "invalid_request"),
        (pack([2, "heartbeat", ["x"]]), None, "invalid_request"),
        (pack([2, "heartbeat", [-1.0]]), None, "invalid_request"),
        (pack([2, "heartbeat", [float("nan")]]), None, "invalid_request"),
        (pack([0, 7, "generate", [{}]])[:-1] + b"\xc1", 7, "malformed_message"),
        (pack([0, 7, "generate", [{"prompt": "x"}]])[:-1], 7, "malformed_message"),
        (b"\x94\x00\x07\xa1x\x91\x82\xa1a\x01\xa1a\x02", 7, "malformed_message"),  # a key twice
        (pack([0, 7, "generate", [{"prompt": "x" * REQUEST_LIMITS.max_bytes}]]), 7, "frame_too_large"),
    ],
)
def test_a_bad_message_gets_a_typed_error_with_its_msgid_where_there_is_one(
    data: bytes, msgid: int | None, code: str
) -> None:
    server = ServerConnection(4)
    assert refusal(server.receive(data)) == (msgid, code)
    assert isinstance(server.receive(pack([0, 7, "generate", [{}]])), CallReceived)  # the connection survives it


def test_the_service_ignores_unknown_notifications_and_a_client_reports_them() -> None:
    server = ServerConnection(4)
    assert server.receive(pack([2, "from_the_future", [1, {"a": 2}]])) is None
    client = ClientConnection()
    assert client.receive(pack([2, "from_the_future", [1]])) == Notified("from_the_future", [1])


def test_a_response_gets_no_response_since_that_might_go_on_for_ever() -> None:
    assert ServerConnection(4).receive(pack([1, 7, None, {}])) is None


def test_names_may_come_as_binary_data() -> None:
    server = ServerConnection(4)
    assert server.receive(pack([0, 7, b"stats", []])) == CallReceived(7, "stats", {})
    assert server.receive(pack([2, b"cancel", [7]])) == CancelRequest(7)
    assert server.receive(pack([2, b"\xff", [7]])) is None


def test_credit_and_coalescing_are_announced_with_the_stream() -> None:
    client, server = ClientConnection(), ServerConnection(4)
    options = StreamOptions(credit=3, coalesce=True)
    msgid, data = client.request("stream", {"prompt": "x"}, options)
    assert msgpack.unpackb(data)[3] == [{"prompt": "x"}, {"credit": 3, "coalesce": True}]
    assert server.receive(data) == CallReceived(msgid, "stream", {"prompt": "x"}, options)
    assert server.receive(client.credit(msgid, 5)) == CreditGranted(msgid, 5)
    server.result(msgid, {})
    assert server.receive(client.credit(msgid, 5)) is None  # it crossed the final


def test_several_tokens_in_a_message_arrive_in_order_less_those_of_cancelled_calls() -> None:
    client, server = ClientConnection(), ServerConnection(4)
    first, data = client.request("stream", {})
    server.receive(data)
    second, data = client.request("stream", {})
    server.receive(data)
    arrays = [server.token(msgid, token(index)) for index in (0, 1) for msgid in (first, second)]
    message = tokens_message([array for array in arrays if array is not None])
    assert msgpack.unpackb(message)[2][1] == [second, 0, 10, "x"]
    client.cancel(second)
    assert client.receive(message) == TokensReceived([(first, token(0)), (first, token(1))])


def test_a_heartbeat_may_tell_its_lease() -> None:
    server = ServerConnection(4)
    assert server.receive(pack([2, "heartbeat", []])) == Heartbeat(None)
    assert server.receive(ClientConnection().heartbeat(2.5)) == Heartbeat(2.5)
    assert ClientConnection().receive(server.heartbeat()) == Heartbeat()


def test_a_result_that_cannot_be_sent_leaves_the_call_open_for_an_error() -> None:
    server = ServerConnection(4)
    server.receive(pack([0, 1, "stats", []]))
    with pytest.raises((TypeError, ValueError, OverflowError)):
        server.result(1, {"lock": object()})
    server.error(1, InvalidRequest(None, "x"))


def test_a_second_final_is_our_bug() -> None:
    server = ServerConnection(4)
    server.receive(pack([0, 1, "stats", []]))
    server.result(1, {})
    with pytest.raises(IllegalEvent):
        server.result(1, {})
    with pytest.raises(IllegalEvent):
        server.token(1, token(0))


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=80) | st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["generate", "cancel", "heartbeat", "token"])
    | st.floats(), lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12).map(pack))  # fmt: skip
def test_no_bytes_break_either_end(data: bytes) -> None:
    server, client = ServerConnection(4), ClientConnection()
    server.receive(pack([0, 1, "stream", [{}]]))
    client.request("stream", {})
    server.receive(data)
    try:
        client.receive(data)
    except (MalformedMessage, FrameTooLarge):
        return


# The client's end


def test_a_request_is_what_the_service_reads() -> None:
    client, server = ClientConnection(), ServerConnection(4)
    msgid, data = client.request("generate", GenerateRequest(prompt="x", stop=["a"], max_tokens=3))
    assert msgpack.unpackb(data) == [0, msgid, "generate", [{"prompt": "x", "stop": ["a"], "max_tokens": 3}]]
    assert server.receive(data) == CallReceived(msgid, "generate", {"prompt": "x", "stop": ["a"], "max_tokens": 3})


def test_tokens_and_the_result_arrive_as_they_were_sent() -> None:
    client, server = ClientConnection(), ServerConnection(4)
    msgid, data = client.request("stream", {})
    server.receive(data)
    tokens = [token(0, "a"), token(0, "b", choice=1), Token(text="c", token_id=1, index=1, logprob=-0.25)]
    for each in tokens:
        message = sent(server, msgid, each)
        assert message is not None
        assert client.receive(message) == TokenReceived(msgid, each)
    assert client.receive(server.result(msgid, {"text": "abc"})) == CallAnswered(msgid, {"text": "abc"})
    assert len(client.calls) == 0


def test_a_resumed_stream_begins_after_the_tokens_that_its_caller_has() -> None:
    client = ClientConnection()
    msgid, _ = client.request("stream", {}, StreamOptions(drawn=(DrawnTokens([5, 6]), DrawnTokens([]))))
    client.receive(pack([2, "tokens", [[msgid, 2, 5, "x"], [msgid, 0, 5, "x", {"choice": 1}]]]))
    with pytest.raises(MalformedMessage, match="token 2 of call 1 arrived in place of token 3"):
        client.receive(pack([2, "token", [msgid, 2, 5, "x"]]))


def test_without_limits_messages_of_any_size_pass() -> None:
    client, server = ClientConnection(limits=None), ServerConnection(4, limits=None)
    msgid, data = client.request("generate", {"prompt": "x" * REQUEST_LIMITS.max_bytes})
    assert isinstance(server.receive(data), CallReceived)
    answer = list(range(RESPONSE_LIMITS.max_array_length + 1))
    assert client.receive(server.result(msgid, answer)) == CallAnswered(msgid, answer)
    assert isinstance(server.receive(b"\xc1"), Refused)
    with pytest.raises(MalformedMessage):
        client.receive(b"\xc1")


def test_an_error_arrives_as_its_class() -> None:
    client, server = ClientConnection(), ServerConnection(4)
    msgid, data = client.request("stream", {})
    server.receive(data)
    event = client.receive(server.error(msgid, QueueFull("full", retry_after_ms=3)))
    assert isinstance(event, CallFailed) and isinstance(event.error, QueueFull)
    assert (event.msgid, event.error.retry_after_ms) == (msgid, 3)


def test_an_error_about_no_call_in_particular_arrives_without_a_msgid() -> None:
    event = ClientConnection().receive(pack([1, None, {"code": "malformed_message", "message": "x"}, None]))
    assert isinstance(event, CallFailed) and event.msgid is None
    assert isinstance(event.error, MalformedMessage)


def test_of_a_stream_that_has_ended_nothing_is_remembered() -> None:
    """A client lives long: what each of its streams left behind would be memory without end."""
    client = ClientConnection()
    for end in ("final", "cancelled"):
        msgid, _ = client.request("stream", {})
        for choice in (0, 1):
            client.receive(pack([2, "token", [msgid, 0, 5, "x", {"choice": choice}]]))
        assert len(client._next_index) == 2
        if end == "cancelled":
            client.cancel(msgid)
        client.receive(pack([1, msgid, None, {}]))
        assert not client._next_index and len(client.calls) == 0


def test_nothing_more_is_reported_of_a_call_given_up() -> None:
    client = ClientConnection()
    msgid, _ = client.request("stream", {})
    assert msgpack.unpackb(client.cancel(msgid) or b"") == [2, "cancel", [msgid]]
    assert client.cancel(msgid) is None
    assert client.receive(pack([2, "token", [msgid, 0, 1, "late"]])) is None
    assert client.receive(pack([1, msgid, None, {}])) is None
    assert client.cancel(msgid) is None
    assert len(client.calls) == 0


@pytest.mark.parametrize(
    "message",
    [
        [2, "token", [1, 1, 5, "gap"]],
        [2, "token", [9, 0, 5, "nobody asked"]],
        [2, "token", [1, 0, True, "x"]],
        [2, "token", [1, 0, 5, "x", 7]],
        [2, "token", [1, 0, 5, "x", {"choice": "a"}]],
        [1, 9, None, {}],
        [1, 1, "an error of another kind", None],
        [1, True, None, {}],
        [1, 1],
        [0, 1, "generate", [{}]],
        "hello",
    ],
    ids=str,
)
def test_a_service_that_breaks_the_protocol_is_found_out(message: Any) -> None:
    client = ClientConnection()
    assert client.request("stream", {})[0] == 1
    with pytest.raises(MalformedMessage):
        client.receive(pack(message))


def test_a_request_too_large_for_the_service_is_not_sent() -> None:
    client = ClientConnection()
    with pytest.raises(FrameTooLarge):
        client.request("generate", {"prompt": "x" * REQUEST_LIMITS.max_bytes})
    assert len(client.calls) == 0


DEEP: Any = []
for _ in range(3000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("params", "field", "reason"),
    [
        ({"prompt": "a\ud800"}, "prompt", "lone surrogate"),
        ({"prompt": "a", "seed": 2**70}, "seed", "more than 64 bits"),
        ({"token_ids": [1, -(2**70)]}, "token_ids[1]", "more than 64 bits"),
        ({"messages": [Message(role="user", content="\udfff")]}, "messages[0].content", "lone surrogate"),
        ({"tools": [{"parameters": {"a\ud800": 1}}]}, "tools[0].parameters", "lone surrogate"),
        ({"tools": [{"parameters": {"a": {"b": object()}}}]}, "tools[0].parameters.a.b", "of type object cannot be"),
        ({"prompt": "a", "tools": [{"parameters": DEEP}]}, "tools", "nested too deeply"),
    ],
)
def test_a_request_that_has_no_form_on_the_wire_is_refused_by_its_field(
    params: dict[str, Any], field: str, reason: str
) -> None:
    client = ClientConnection()
    with pytest.raises(InvalidRequest, match=reason) as caught:
        client.request("generate", params)
    assert caught.value.field == field
    assert len(client.calls) == 0
    assert why_unsendable({"prompt": "a", "seed": 2**63}) is None


class TwoEnds(RuleBasedStateMachine):
    """A client and a service with messages on their way in both directions, in any order of steps."""

    calls = Bundle("calls")

    @initialize()
    def connect(self) -> None:
        self.client, self.server = ClientConnection(), ServerConnection(max_calls=3)
        self.to_server: list[bytes] = []
        self.to_client: list[bytes] = []
        self.sent: dict[int, int] = {}  # tokens by msgid
        self.received: dict[int, int] = {}
        self.given_up: set[int] = set()
        self.finals: dict[int, int] = {}  # by msgid, as seen on the wire

    @rule(target=calls)
    def request(self) -> int:
        msgid, data = self.client.request("stream", {})
        self.to_server.append(data)
        return msgid

    @rule(msgid=consumes(calls))
    def cancel(self, msgid: int) -> None:
        data = self.client.cancel(msgid)
        self.given_up.add(msgid)
        if data is not None:
            self.to_server.append(data)

    @rule()
    def deliver_to_server(self) -> None:
        if self.to_server:
            event = self.server.receive(self.to_server.pop(0))
            if isinstance(event, Refused):
                assert isinstance(event.error, QueueFull)
                self.post(event.reply)

    @rule(count=st.integers(1, 3))
    def generate(self, count: int) -> None:
        for msgid in self.server.calls.open_calls():
            for _ in range(count):
                index = self.sent.get(msgid, 0)
                message = sent(self.server, msgid, token(index))
                if message is not None:
                    self.sent[msgid] = index + 1
                    self.post(message)

    @rule(oldest=st.booleans(), fails=st.booleans())
    def finish(self, oldest: bool, fails: bool) -> None:
        calls = self.server.calls.open_calls()
        if calls:
            msgid = calls[0 if oldest else -1]
            error = Cancelled("x")
            self.post(self.server.error(msgid, error) if fails else self.server.result(msgid, {"n": msgid}))

    @rule()
    def deliver_to_client(self) -> None:
        if not self.to_client:
            return
        match self.client.receive(self.to_client.pop(0)):
            case TokenReceived(msgid, received):
                assert msgid not in self.given_up
                assert received.index == self.received.get(msgid, 0)
                self.received[msgid] = received.index + 1
            case CallAnswered(msgid, result):
                assert msgid not in self.given_up
                assert result == {"n": msgid}
                assert self.received.get(msgid, 0) == self.sent.get(msgid, 0)
            case CallFailed(msgid, _):
                assert msgid not in self.given_up

    def post(self, message: bytes) -> None:
        kind, msgid, *_ = msgpack.unpackb(message)
        if kind == 1:
            self.finals[msgid] = self.finals.get(msgid, 0) + 1
        else:
            (msgid, *_) = _[0]
        assert self.finals.get(msgid, 0) <= (1 if kind == 1 else 0)  # one final, and nothing after it
        self.to_client.append(message)

    @invariant()
    def nothing_is_kept_of_ended_calls(self) -> None:
        if hasattr(self, "client") and not self.to_server and not self.to_client:
            assert self.client.calls.open_calls() == self.server.calls.open_calls()


TestTwoEnds = TwoEnds.TestCase
TestTwoEnds.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_every_code_on_the_wire_is_a_class_at_the_client() -> None:
    assert type(from_wire(Cancelled("x").to_wire())) is Cancelled
