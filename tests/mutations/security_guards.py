"""What keeps strangers out, and one tenant from another."""

from tests.mutations.mutation import Mutation

DISPATCHER = "actors/gateways/dispatcher.py"
ZEROMQ_SECURITY = "actors/gateways/test_zeromq_security.py::"

SECURITY_GUARDS = (
    Mutation(
        "list of keys",
        "actors/gateways/zeromq_guard.py",
        "if name is None:",
        "if False:",
        (ZEROMQ_SECURITY + "test_a_key_that_is_not_on_the_list_gets_nowhere",),
        "whoever makes a key is let in",
    ),
    Mutation(
        "keys taken off the list",
        "actors/gateways/zeromq_gateway.py",
        "        if self._guard.is_welcome(peer.key):\n",
        "        if True:\n",
        (ZEROMQ_SECURITY + "test_a_key_taken_off_the_list_counts_no_more_even_for_open_connections",),
        "a revoked key is good for as long as it stays connected",
    ),
    Mutation(
        "streams of keys taken off the list",
        "actors/gateways/zeromq_gateway.py",
        "        if not self._guard.is_welcome(peer.key):\n",
        "        if False:\n",
        (ZEROMQ_SECURITY + "test_a_revoked_clients_stream_ends_though_it_says_nothing",),
        "a revoked key's stream goes on",
    ),
    Mutation(
        "no identity handed over",
        "actors/gateways/zeromq_gateway.py",
        "zmq.ROUTER_HANDOVER, 0",
        "zmq.ROUTER_HANDOVER, 1",
        (
            ZEROMQ_SECURITY + "test_a_taken_identity_is_not_handed_over",
            "actors/gateways/test_zeromq_gateway.py::"
            "test_a_second_connection_with_the_same_identity_takes_nothing_over",
        ),
        "a stranger gets another's tokens",
    ),
    Mutation(
        "tenant is the key's",
        DISPATCHER,
        "return msgspec.structs.replace(request, tenant=caller.tenant)",
        "return request",
        (ZEROMQ_SECURITY + "test_a_client_with_a_key_on_the_list_is_served_in_its_own_name",),
        "a tenant's prompts are shared with nobody's",
    ),
    Mutation(
        "no other tenant's name",
        DISPATCHER,
        "    if request.tenant:\n",
        "    if request.tenant:\n        return request\n    if False:\n",
        (ZEROMQ_SECURITY + "test_a_client_cannot_speak_in_anothers_name",),
        "a client uses another's share and prompts",
    ),
    Mutation(
        "share is the key's",
        DISPATCHER,
        'return self.client if self.tenant is None else f"tenant:{self.tenant}"',
        "return self.client",
        ("actors/gateways/test_dispatcher.py::test_a_key_has_one_share_however_many_connections_it_has",),
        "more connections are a larger share",
    ),
    Mutation(
        "drain is the operator's",
        DISPATCHER,
        "if row.is_operators and tenant is not None:",
        "if False:",
        (ZEROMQ_SECURITY + "test_the_service_cannot_be_drained_by_its_clients",),
        "a client stops the service",
    ),
    Mutation(
        "token before anything, msgpack-RPC",
        "actors/gateways/rpc_gateway.py",
        "if self._authenticate is not None and tenant is None:",
        "if False:",
        ("clients/test_rpc.py::test_a_client_without_the_right_token_is_told_so",),
        "strangers are let in",
    ),
    Mutation(
        "size before the token",
        "actors/gateways/rpc_gateway.py",
        "MAX_HELLO_BYTES if self._asks_for_hello else MAX_TRANSPORT_BYTES",
        "MAX_TRANSPORT_BYTES",
        ("clients/test_rpc.py::test_a_first_message_that_is_large_or_slow_is_not_read_on",),
        "strangers take memory",
    ),
    Mutation(
        "tokens taken off the list",
        "actors/gateways/rpc_gateway.py",
        "if self._authenticate is not None and self._authenticate(self._token) != self.session.tenant:",
        "if False:",
        ("clients/test_rpc.py::test_a_token_that_is_taken_away_ends_the_connection",),
        "a revoked token is good for as long as it stays connected",
    ),
    Mutation(
        "a hello first, over TCP",
        "actors/gateways/rpc_gateway.py",
        "asks_for_hello=stream.socket.family != socket.AF_UNIX",
        "asks_for_hello=False",
        ("actors/gateways/test_rpc_gateway.py::test_over_tcp_nothing_is_done_before_a_hello",),
        "a web page stops the service",
    ),
    Mutation(
        "another protocol is the connection's end",
        "actors/gateways/session.py",
        "return not is_foreign",
        "return True",
        (
            "actors/gateways/test_rpc_gateway.py::test_who_speaks_another_protocol_is_cut_off_and_nothing_behind_it_is_done",
        ),
        "the body of an HTTP request is executed",
    ),
    Mutation(
        "old greetings",
        "actors/gateways/zeromq_guard.py",
        "        socket.set(zmq.ZAP_DOMAIN, DOMAIN)\n        monitor",
        "        monitor",
        (
            "actors/gateways/test_raw_zmtp.py::test_a_peer_of_another_protocol_or_version_is_cut_off_and_disturbs_nobody",
        ),
        "a web page reaches the ZeroMQ gateway",
    ),
    Mutation(
        "token before anything, HTTP",
        "actors/gateways/http/front.py",
        'if self._authenticate is None or scope["path"] in OPEN_PATHS:',
        "if True:",
        ("actors/gateways/http/test_http_gateway.py::test_a_token_opens_the_service_in_the_name_it_goes_with",),
        "strangers are let in",
    ),
    Mutation(
        "tokens are compared in constant time",
        "actors/security/key_files.py",
        "if hmac.compare_digest(given, known):",
        "if given == known:",
        ("actors/gateways/test_token_file.py::test_all_hashes_are_compared_in_constant_time",),
        "the time that a refusal takes tells of the hash",
    ),
    Mutation(
        "bind policy",
        "actors/security/security.py",
        "if lacking and not is_loopback(host):",
        "if False:",
        (
            "actors/gateways/test_bind_policy.py::"
            "test_a_host_that_others_may_reach_is_refused_with_the_option_and_what_to_do",
        ),
        "everybody on the network is let in",
    ),
    Mutation(
        "pages of other sites",
        "actors/gateways/http/front.py",
        "if origin is not None and _host_of(origin) != host and origin.lower() not in self._origins:",
        "if False:",
        ("actors/gateways/http/test_http_gateway.py::test_a_page_of_another_site_reaches_nothing",),
        "a page that this machine's user looks at uses the service",
    ),
    Mutation(
        "names that lead to this machine",
        "actors/gateways/http/front.py",
        "        if self._only_loopback:\n            wanted",
        "        if self._only_loopback:\n            return\n            wanted",
        ("actors/gateways/http/test_http_gateway.py::test_a_page_of_another_site_reaches_nothing",),
        "a page gets in under a name of its own",
    ),
)
