"""What keeps strangers out, and one tenant from another."""

from tests.mutations.mutation import (
    Mutation,
    always,
    argument_becomes,
    body_begins,
    call_becomes,
    dropped,
    never,
    only_otherwise,
    only_then,
    value_becomes,
)

ZEROMQ_SECURITY = "actors/gateways/test_zeromq_security.py::"

SECURITY_GUARDS = (
    Mutation(
        "list of keys",
        never,
        (ZEROMQ_SECURITY + "test_a_key_that_is_not_on_the_list_gets_nowhere",),
        "whoever makes a key is let in",
    ),
    Mutation(
        "keys taken off the list",
        always,
        (ZEROMQ_SECURITY + "test_a_key_taken_off_the_list_counts_no_more_even_for_open_connections",),
        "a revoked key is good for as long as it stays connected",
    ),
    Mutation(
        "streams of keys taken off the list",
        never,
        (ZEROMQ_SECURITY + "test_a_revoked_clients_stream_ends_though_it_says_nothing",),
        "a revoked key's stream goes on",
    ),
    Mutation(
        "identities are not handed over",
        argument_becomes("set", 1, "1"),
        (
            ZEROMQ_SECURITY + "test_a_taken_identity_is_not_handed_over",
            "actors/gateways/test_zeromq_gateway.py::"
            "test_a_second_connection_with_the_same_identity_takes_nothing_over",
        ),
        "a stranger gets another's tokens",
    ),
    Mutation(
        "tenant of the key",
        value_becomes("request"),
        (ZEROMQ_SECURITY + "test_a_client_with_a_key_on_the_list_is_served_in_its_own_name",),
        "a tenant shares prompts with requests without a tenant",
    ),
    Mutation(
        "no other tenant's name",
        body_begins("return request"),
        (ZEROMQ_SECURITY + "test_a_client_cannot_speak_in_anothers_name",),
        "a client uses another's share and prompts",
    ),
    Mutation(
        "share of the key",
        only_then,
        ("actors/gateways/test_dispatcher.py::test_a_key_has_one_share_however_many_connections_it_has",),
        "more connections are a larger share",
    ),
    Mutation(
        "drain is the operator's",
        never,
        (ZEROMQ_SECURITY + "test_the_service_cannot_be_drained_by_its_clients",),
        "a client stops the service",
    ),
    Mutation(
        "only the same user takes over",
        never,
        ("actors/service/test_take_over.py::test_another_user_takes_nothing_over_and_is_not_taken_over",),
        "another user's process gets the service's sockets",
    ),
    Mutation(
        "token before anything, msgpack-RPC",
        never,
        ("clients/test_rpc.py::test_a_client_without_the_right_token_is_told_so",),
        "strangers are let in",
    ),
    Mutation(
        "size before the token",
        only_otherwise,
        ("clients/test_rpc.py::test_a_first_message_that_is_large_or_slow_is_not_read_on",),
        "strangers take memory",
    ),
    Mutation(
        "tokens taken off the list",
        never,
        ("clients/test_rpc.py::test_a_token_that_is_taken_away_ends_the_connection",),
        "a revoked token is good for as long as it stays connected",
    ),
    Mutation(
        "a hello first, over TCP",
        value_becomes("False"),
        ("actors/gateways/test_rpc_gateway.py::test_over_tcp_nothing_is_done_before_a_hello",),
        "a web page stops the service",
    ),
    Mutation(
        "another protocol is the connection's end",
        value_becomes("True"),
        (
            "actors/gateways/test_rpc_gateway.py::test_who_speaks_another_protocol_is_cut_off_and_nothing_behind_it_is_done",
        ),
        "the body of an HTTP request is executed",
    ),
    Mutation(
        "old greetings",
        dropped,
        (
            "actors/gateways/test_raw_zmtp.py::test_a_peer_of_another_protocol_or_version_is_cut_off_and_disturbs_nobody",
        ),
        "a web page reaches the ZeroMQ gateway",
    ),
    Mutation(
        "numbers of clients",
        dropped,
        ("actors/gateways/test_raw_zmtp.py::test_nobody_can_foresee_the_number_of_the_next_client_and_claim_it",),
        "a peer that claims the next client's number ends the gateway's process",
    ),
    Mutation(
        "token before anything, HTTP",
        always,
        ("actors/gateways/http/test_http_gateway.py::test_a_token_opens_the_service_in_the_name_it_goes_with",),
        "strangers are let in",
    ),
    Mutation(
        "tokens are compared in constant time",
        call_becomes("compare_digest", "{0} == {1}"),
        ("actors/gateways/test_token_file.py::test_all_hashes_are_compared_in_constant_time",),
        "the time that a refusal takes tells of the hash",
    ),
    Mutation(
        "bind policy",
        never,
        (
            "actors/gateways/test_bind_policy.py::"
            "test_a_host_that_others_may_reach_is_refused_with_the_option_and_what_to_do",
        ),
        "the service accepts everyone on the network",
    ),
    Mutation(
        "pages of other sites",
        never,
        ("actors/gateways/http/test_http_gateway.py::test_a_page_of_another_site_reaches_nothing",),
        "a page that this machine's user looks at uses the service",
    ),
    Mutation(
        "names that lead to this machine",
        body_begins("return"),
        ("actors/gateways/http/test_http_gateway.py::test_a_page_of_another_site_reaches_nothing",),
        "a page gets in under a name of its own",
    ),
    Mutation(
        "ids that are paths",
        always,
        ("actors/gateways/http/test_batches.py::test_an_id_is_no_path",),
        "a client reads any file of the service's user",
    ),
    Mutation(
        "another owner's files and batches",
        always,
        ("actors/gateways/http/test_batches.py::test_another_owner_sees_nothing",),
        "a client reads what others asked and were answered",
    ),
)
