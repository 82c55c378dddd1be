"""Who is let in, whose turn it is, and who gives way."""

from tests.mutations.mutation import (
    Mutation,
    always,
    argument_becomes,
    call_becomes,
    catches_only,
    dropped,
    never,
    replaced_by,
    unfiltered,
    value_becomes,
)

BAD_REQUESTS = ("actors/batcher/test_answers.py::test_bad_requests_get_typed_errors_and_the_others_do_not_notice",)

LOADED_MODELS = "actors/service/test_loaded_models.py::"

OVERLOAD_GUARDS = (
    Mutation(
        "the prompt fits",
        never,
        BAD_REQUESTS,
        "a prompt that can never run waits forever",
    ),
    Mutation(
        "the answer fits",
        call_becomes("min", "{0}"),
        ("actors/batcher/test_answers.py::test_an_answer_that_does_not_fit_is_cut_to_the_room_that_is_left",),
        "a request runs into the end of the context",
    ),
    Mutation(
        "token ids of a request",
        never,
        BAD_REQUESTS,
        "an id beyond the vocabulary reaches the model",
    ),
    Mutation(
        "bound of the queue",
        never,
        ("actors/batcher/test_admission.py::test_the_queue_holds_max_queue_and_what_free_slots_take_at_once",),
        "the queue grows without end",
    ),
    Mutation(
        "a client's share of the queue",
        never,
        ("actors/batcher/test_admission.py::test_whatever_greedy_clients_ask_there_is_room_for_a_newcomer",),
        "one client fills the queue for all",
    ),
    Mutation(
        "a client's open requests",
        never,
        ("actors/batcher/test_admission.py::test_beside_others_a_client_has_two_sequences_a_slot_open",),
        "one client holds all slots",
    ),
    Mutation(
        "hopeless deadline",
        never,
        ("actors/batcher/test_admission.py::test_a_deadline_before_its_turn_is_refused_at_once",),
        "work begins that no caller waits for",
    ),
    Mutation(
        "default deadline",
        value_becomes("None"),
        (
            "actors/batcher/test_overload.py::test_a_clients_request_without_a_deadline_waits_no_longer_than_the_default_one",
        ),
        "a request without a deadline waits forever",
    ),
    Mutation(
        "default deadline, once it has a slot",
        never,
        ("actors/batcher/test_overload.py::test_the_default_deadline_does_not_end_an_answer_that_is_being_generated",),
        "a long answer is thrown away",
    ),
    Mutation(
        "limit on an answer's time",
        never,
        ("actors/batcher/test_overload.py::test_the_operators_limit_on_an_answers_time_ends_it_as_its_length_does",),
        "an answer takes longer than the operator allows",
    ),
    Mutation(
        "no loads while draining",
        never,
        (LOADED_MODELS + "test_a_draining_service_loads_nothing_more_and_refuses_who_waits",),
        "a service that stops loads models",
    ),
    Mutation(
        "models that never fit",
        never,
        (LOADED_MODELS + "test_a_model_that_never_fits_is_refused_and_one_that_was_measured_larger_is_served_alone",),
        "a model takes all memory",
    ),
    Mutation(
        "back-off of failed loads",
        never,
        (LOADED_MODELS + "test_a_failed_load_ends_its_requests_and_is_tried_again_after_a_bounded_pause",),
        "a broken model is loaded all the time",
    ),
    Mutation(
        "requests that wait for a load",
        never,
        (LOADED_MODELS + "test_requests_that_wait_for_a_load_are_bounded",),
        "memory grows while a model loads",
    ),
    Mutation(
        "a load without a waiting caller",
        never,
        (LOADED_MODELS + "test_a_load_that_nobody_waits_for_goes_on_until_another_model_is_wanted",),
        "a caller that left makes others wait",
    ),
    Mutation(
        "a model's turn",
        never,
        (LOADED_MODELS + "test_a_busy_model_takes_no_newcomers_once_another_one_waits_for_its_room",),
        "models are loaded all the time and serve nobody",
    ),
    Mutation(
        "models with open requests stay",
        never,
        (LOADED_MODELS + "test_an_idle_model_is_unloaded_after_keep_alive_and_not_before",),
        "a model goes during an answer",
    ),
    Mutation(
        "one load at a time",
        never,
        (LOADED_MODELS + "test_models_are_loaded_one_after_another",),
        "loads share the memory that each has measured as free",
    ),
    Mutation(
        "default deadline, at the link",
        value_becomes("None"),
        (
            "actors/engine/test_remote_batcher.py::"
            "test_a_clients_request_waits_for_an_engine_no_longer_than_the_default_deadline",
        ),
        "a request waits forever while there is no engine",
    ),
    Mutation(
        "deadline at each step",
        never,
        ("actors/batcher/test_batcher.py::test_a06_a_deadline_ends_a_request_with_what_it_has",),
        "a request continues after its deadline",
    ),
    Mutation(
        "deadline during a run",
        replaced_by("return False"),
        ("actors/batcher/test_run_ahead.py::test_a_deadline_ends_a_request_during_a_run",),
        "a request continues for up to 64 steps after its deadline",
    ),
    Mutation(
        "callers that leave",
        never,
        (
            "actors/batcher/test_batcher.py::test_a06_a_cancelled_caller_frees_its_sequence_at_the_next_tick",
            "actors/batcher/test_batcher.py::test_a06_callers_that_leave_while_waiting_never_run",
        ),
        "a request without a caller keeps its slot",
    ),
    Mutation(
        "draining takes nothing new",
        dropped,
        ("actors/batcher/test_service_calls.py::test_a_draining_batcher_finishes_what_it_has_and_takes_nothing_new",),
        "a service that is to stop never does",
    ),
    Mutation(
        "clients take turns",
        always,
        ("actors/batcher/test_overload.py::test_a_client_with_one_request_does_not_wait_behind_anothers_four",),
        "the client with most requests is served most",
    ),
    Mutation(
        "counter of a returning client",
        call_becomes("max", "{0}"),
        ("actors/scheduling/test_fair_share.py::test_nobody_saves_up_a_claim_by_staying_away",),
        "a client saves up turns by staying away",
    ),
    Mutation(
        "tokens of a client at other replicas",
        dropped,
        ("actors/batcher/test_overload.py::test_what_a_client_had_of_a_fleets_other_replicas_counts_here",),
        "a client that uses every replica gets a share of each",
    ),
    Mutation(
        "payer that a caller claims",
        never,
        (
            "actors/gateways/test_dispatcher.py"
            "::test_only_a_fleets_gateways_say_whom_they_ask_for_and_may_drain_with_a_key",
        ),
        "a client charges another one",
    ),
    Mutation(
        "ageing",
        value_becomes("1e9 * params.priority"),
        ("actors/batcher/test_overload.py::test_a_priority_is_worth_so_much_waiting_and_no_more",),
        "the less urgent starve",
    ),
    Mutation(
        "the first request is never paused",
        argument_becomes("range", 1, "-1"),
        (
            "actors/scheduling/test_capacity.py::test_a_request_that_was_paused_twice_is_spared_while_there_is_another",
            "actors/scheduling/test_capacity.py::test_b17_the_request_that_has_run_longest_is_never_paused",
        ),
        "requests pause one another forever",
    ),
    Mutation(
        "pauses of the client with most",
        unfiltered,
        (
            "actors/scheduling/test_capacity.py::"
            "test_a_newcomer_is_not_paused_for_the_client_that_has_most_requests_running",
        ),
        "a newcomer is paused for the requests of a greedy client",
    ),
    Mutation(
        "pauses of one request",
        unfiltered,
        ("actors/scheduling/test_capacity.py::test_a_request_that_was_paused_twice_is_spared_while_there_is_another",),
        "the newest is computed again and again",
    ),
    Mutation(
        "requests that never fit",
        never,
        ("actors/scheduling/test_capacity.py::test_s05_what_can_never_fit_is_reported_and_holds_nobody_back",),
        "a request that never fits holds back all others",
    ),
    Mutation(
        "bodies of tiny chunks",
        dropped,
        ("actors/gateways/http/test_connection.py::test_between_the_tiny_chunks_of_a_body_other_tasks_run",),
        "a body in chunks of a byte keeps all others waiting",
    ),
    Mutation(
        "share of the blocks",
        value_becomes("[]"),
        (
            "simulation/test_greedy_client.py::"
            "test_a_request_that_fills_the_pool_gives_way_to_polite_clients_and_keeps_its_text",
        ),
        "one client's request fills the pool and others wait for its end",
    ),
    Mutation(
        "a batch that fails, such as on a full disk",
        catches_only("KeyError"),
        ("actors/gateways/http/test_batches.py::test_a_full_disk_fails_that_batch_alone_and_nothing_else",),
        "a full disk restarts the HTTP gateway",
    ),
)
