"""What stands between a client's bytes and the service: sizes, ranges, msgids, credit, leases, bounds."""

from tests.mutations.mutation import (
    Mutation,
    always,
    argument_becomes,
    dropped,
    never,
    replaced_by,
    value_becomes,
    without_operand,
)

DOORS = "actors/gateways/http/test_doors.py"
CAPS = ("proto/test_messages.py::test_the_operator_sets_the_caps",)
EDGES = ("proto/test_codec.py::test_limits_hold_at_their_edges",)

WIRE_GUARDS = (
    Mutation(
        "cap on n",
        argument_becomes("_check_range", 3, "MAX_COUNT"),
        CAPS,
        "one request takes every slot",
    ),
    Mutation(
        "cap on logprobs",
        argument_becomes("_check_given_range", 3, "MAX_COUNT"),
        CAPS,
        "each token brings the whole vocabulary",
    ),
    Mutation(
        "cap on stop strings",
        dropped,
        CAPS,
        "each token is searched for thousands of texts",
    ),
    Mutation(
        "cap on the deadline",
        argument_becomes("_check_range", 3, "MAX_COUNT"),
        CAPS,
        "a request waits forever",
    ),
    Mutation(
        "cap on a grammar's size",
        never,
        ("proto/test_validation.py::test_the_operator_sets_how_large_it_may_be",),
        "a grammar takes the compiler's time and memory",
    ),
    Mutation(
        "cap on a message's size",
        never,
        EDGES,
        "a message takes the memory it likes",
    ),
    Mutation(
        "cap on nesting",
        never,
        EDGES,
        "a walk over a message runs out of stack",
    ),
    Mutation(
        "cap on containers",
        never,
        ("proto/test_codec.py::test_no_message_takes_more_than_a_hundred_times_its_size", *EDGES),
        "a megabyte of empty maps becomes a hundred",
    ),
    Mutation(
        "lengths are true",
        dropped,
        ("proto/test_codec.py::test_no_message_takes_more_than_a_hundred_times_its_size",),
        "a length that lies reserves memory",
    ),
    Mutation(
        "no key twice",
        never,
        ("proto/test_codec.py::test_malformed_bytes_are_refused",),
        "two readers of one message see different requests",
    ),
    Mutation(
        "cap on a frame, ZeroMQ",
        argument_becomes("set", 1, "-1"),
        ("actors/gateways/test_zeromq_gateway.py::test_a_frame_beyond_the_transports_limit_ends_that_connection_only",),
        "a frame of a gigabyte is received",
    ),
    Mutation(
        "cap on a message, msgpack-RPC",
        never,
        ("proto/test_codec.py::test_an_endless_message_holds_no_more_than_its_size_and_breaks_at_the_limit",),
        "a message without an end is kept",
    ),
    Mutation(
        "cap on a body, HTTP",
        never,
        (
            "actors/gateways/http/test_http_gateway.py::test_a_body_that_is_too_large_is_refused_even_where_no_endpoint_is",
        ),
        "a body takes the memory it likes",
    ),
    Mutation(
        "number and size of remembered conversations",
        never,
        (f"{DOORS}::test_the_oldest_conversations_give_way_by_number_and_by_size",),
        "the gateway's memory grows with every response",
    ),
    Mutation(
        "size of one remembered conversation",
        never,
        (f"{DOORS}::test_the_oldest_conversations_give_way_by_number_and_by_size",),
        "one long conversation evicts all other clients' conversations",
    ),
    Mutation(
        "owner of a remembered conversation",
        value_becomes("next((each for (_, name), each in self._known.items() if name == response_id), None)"),
        (f"{DOORS}::test_the_oldest_conversations_give_way_by_number_and_by_size",),
        "a client that guesses an id reads another client's conversation",
    ),
    Mutation(
        "cap on tools",
        dropped,
        (f"{DOORS}::test_more_tools_than_allowed_are_refused_at_every_door",),
        "a request brings tools without end",
    ),
    Mutation(
        "arguments of a call that was sent back",
        dropped,
        (f"{DOORS}::test_what_is_wrong_is_named_and_the_connection_lives",),
        "half a surrogate pair is the service's fault, not the caller's",
    ),
    Mutation(
        "size of the tools' schemas",
        never,
        ("actors/batcher/test_tool_calls.py::test_schemas_of_tools_are_bounded_as_other_grammars_are",),
        "the schemas of 128 tools take the compiler's time and memory",
    ),
    Mutation(
        "a client that leaves its stream, HTTP",
        dropped,
        (f"{DOORS}::test_a_client_that_leaves_ends_its_request",),
        "a response without a reader keeps its slot and its KV",
    ),
    Mutation(
        "msgid in use",
        never,
        ("proto/test_rpc.py::test_a_msgid_in_use_is_refused_without_ending_the_call_that_has_it",),
        "two calls get each other's tokens",
    ),
    Mutation(
        "calls of one client",
        never,
        ("proto/test_rpc.py::test_too_many_open_calls_are_refused_with_a_time_to_retry",),
        "a client opens tasks without end",
    ),
    Mutation(
        "credit of a stream",
        never,
        ("actors/gateways/test_rpc_gateway.py::test_credit_paces_one_stream_alone",),
        "a slow reader gets more than it can take",
    ),
    Mutation(
        "stalled stream",
        never,
        ("actors/gateways/test_rpc_gateway.py::test_a_stream_without_credit_for_long_is_cancelled_alone",),
        "a client that stops reading keeps its slot",
    ),
    Mutation(
        "tokens that wait for credit",
        never,
        ("actors/gateways/test_rpc_gateway.py::test_the_tokens_that_wait_for_credit_are_bounded",),
        "memory grows with unread tokens",
    ),
    Mutation(
        "bound of the outbox",
        value_becomes("False"),
        (
            "actors/gateways/test_rpc_gateway.py::"
            "test_a_client_that_does_not_read_loses_its_calls_and_its_memory_is_bounded",
            "actors/gateways/test_zeromq_gateway.py::"
            "test_a_client_that_does_not_read_loses_its_calls_and_others_do_not_notice",
        ),
        "memory grows with unread tokens",
    ),
    Mutation(
        "lease, ZeroMQ",
        never,
        ("actors/gateways/test_zeromq_gateway.py::test_a_client_silent_for_longer_than_it_promised_loses_its_calls",),
        "a client that died keeps its slots",
    ),
    Mutation(
        "lease, msgpack-RPC",
        never,
        (
            "actors/gateways/test_rpc_gateway.py::"
            "test_a_silent_client_with_a_lease_loses_its_calls_and_one_without_keeps_them",
        ),
        "a client that died keeps its slots",
    ),
    Mutation(
        "flood of messages",
        always,
        (
            "actors/gateways/test_zeromq_flood.py::test_who_sends_too_much_at_once_is_cut_off_alone",
            "actors/gateways/test_zeromq_gateway.py::test_a_client_that_only_writes_cannot_fill_the_memory",
        ),
        "one client's messages delay all other clients' messages",
    ),
    Mutation(
        "message without an end",
        never,
        ("actors/gateways/test_zeromq_endless.py::test_a_message_of_parts_without_an_end_is_cut_off_alone",),
        "libzmq keeps the parts of a message that never ends until memory does",
    ),
    Mutation(
        "unfinished messages of strangers",
        never,
        ("actors/gateways/test_zeromq_endless.py::test_messages_without_an_end_share_a_bound_which_is_given_back",),
        "300 connections that never end a message take gigabytes",
    ),
    Mutation(
        "whole messages of strangers",
        always,
        (
            "actors/gateways/test_zeromq_endless.py::"
            "test_the_clients_with_most_small_messages_make_room_and_small_queues_stay",
        ),
        "messages of one byte fill libzmq's queue faster than they are taken",
    ),
    Mutation(
        "messages of ended connections",
        never,
        (
            "actors/gateways/test_zeromq_endless.py::"
            "test_who_floods_whole_messages_and_connects_again_waits_until_they_are_taken",
        ),
        "a peer that connects again fills as much memory as before",
    ),
    Mutation(
        "messages of an ended connection beside its successor",
        never,
        (
            "actors/gateways/test_zeromq_endless.py::"
            "test_messages_that_an_ended_connection_left_do_not_end_the_calls_of_the_client_with_its_descriptor",
        ),
        "messages that a flood left behind cancel the calls of an innocent client",
    ),
    Mutation(
        "connections of strangers",
        never,
        ("actors/gateways/test_connection_limit.py::test_a_newcomer_pushes_out_the_one_that_was_silent_longest",),
        "a flood of connections takes every descriptor",
    ),
    Mutation(
        "leftovers beside a new connection",
        without_operand(1),
        (
            "actors/gateways/test_zeromq_endless.py::"
            "test_messages_that_an_ended_connection_left_do_not_end_a_client_that_has_said_nothing_yet",
        ),
        "a flood that has ended cuts off the next client with its descriptor",
    ),
    Mutation(
        "descriptor of an ended connection",
        always,
        (
            "actors/gateways/test_zeromq_endless.py::"
            "test_the_event_of_a_connection_that_has_ended_ends_no_other_that_has_its_descriptor",
        ),
        "a newcomer in a flood is ended, and its request is lost",
    ),
    Mutation(
        "all events before a message",
        replaced_by("ended += self._take(self._monitor.try_recv_many(1024))"),
        (
            "actors/gateways/test_zeromq_endless.py::"
            "test_the_events_of_all_connections_are_read_before_a_message_is_judged",
        ),
        "the request of a newcomer in a flood is dropped as one of an ended connection",
    ),
    Mutation(
        "half bodies of strangers",
        dropped,
        ("actors/gateways/http/test_http_gateway.py::test_bodies_that_do_not_end_share_a_bound_which_is_given_back",),
        "connections that never end a body take gigabytes",
    ),
    Mutation(
        "half messages of strangers",
        never,
        ("actors/gateways/test_rpc_gateway.py::test_messages_without_an_end_share_a_bound_which_is_given_back",),
        "connections that never end a message take gigabytes",
    ),
    Mutation(
        "bound of a mailbox",
        always,
        ("actors/runtime/test_actor.py::test_a_full_mailbox_refuses_loses_nothing_and_lets_control_messages_pass",),
        "an actor that is slow takes all memory",
    ),
)
