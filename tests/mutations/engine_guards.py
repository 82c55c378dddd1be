"""What keeps a fault small: in a step, in an engine, in a stream."""

from tests.mutations.mutation import (
    Mutation,
    always,
    call_becomes,
    catches_only,
    dropped,
    never,
    only_then,
    replaced_by,
    value_becomes,
    without_operand,
)

RESUMED = ("actors/batcher/test_resume.py::test_the_rest_is_that_of_a_stream_that_no_death_met",)
SUSPECTS = (
    "actors/engine/test_accepted_requests.py::test_suspects_are_sent_one_at_a_time_the_likeliest_first_and_innocents_live",
)
POISON = ("actors/engine/test_accepted_requests.py::test_poison_is_refused_for_a_while_and_nothing_else_is",)
NAN_ROW = (
    "nif/sampling/test_sampler.py::test_a_row_without_usable_logits_fails_alone",
    "actors/batcher/test_answers.py::test_a_row_of_nan_fails_its_request_alone",
)

DRAFTS = "actors/batcher/test_drafting.py::test_drafts_right_and_wrong_take_fewer_steps_and_give_the_same_bits"
CHECKED = "nif/test_decode_run.py::test_checked_drafts_leave_what_single_steps_leave"

ENGINE_GUARDS = (
    Mutation(
        "draws after a wrong draft do not count",
        without_operand(2),
        (CHECKED, DRAFTS),
        "an answer goes on after a token that was never drawn",
    ),
    Mutation(
        "drafts end at the last token",
        call_becomes("min", "{0}"),
        ("actors/batcher/test_draft_lengths.py::test_nobody_is_drafted_beyond_its_last_token",),
        "a sequence takes more blocks than it was promised",
    ),
    Mutation(
        "no drafted token is outside the model's vocabulary",
        call_becomes("takewhile", "{1}"),
        ("actors/batcher/test_draft_lengths.py::test_no_token_beyond_the_models_vocabulary_is_drafted",),
        "the embedding of a token is read that the model does not have",
    ),
    Mutation(
        "a sampler knows the draft so far",
        dropped,
        ("actors/batcher/test_drafting.py::test_what_edits_its_logits_is_drafted_and_gives_the_same_bits",),
        "a penalty or a grammar misses tokens of the answer",
    ),
    Mutation(
        "messages of an engine that is gone",
        never,
        ("actors/engine/test_remote_batcher.py::test_messages_of_an_engine_that_is_gone_are_dropped",),
        "an engine that is gone ends a request that is replayed",
    ),
    Mutation(
        "replay no cause of two deaths",
        never,
        (*SUSPECTS, *POISON),
        "a deadly request kills one engine after another",
    ),
    Mutation(
        "a sampler counts the tokens of a dead engine",
        dropped,
        RESUMED,
        "a stream goes on with other draws after its engine's death",
    ),
    Mutation(
        "text follows that of a dead engine",
        dropped,
        RESUMED,
        "a stop string that began before the death is not seen",
    ),
    Mutation(
        "replay only within the deadline",
        never,
        (
            "actors/engine/test_accepted_requests.py::test_a_deadline_that_passed_is_not_replayed_and_one_that_remains_is",
        ),
        "an engine works for a request without a caller",
    ),
    Mutation(
        "suspects one at a time",
        call_becomes("any", "all({0})"),
        SUSPECTS,
        "innocents end with the poison",
    ),
    Mutation(
        "one service takes over at a time",
        never,
        ("actors/service/test_take_over.py::test_a_later_service_that_ends_before_it_listens_changes_nothing",),
        "two services have the same addresses",
    ),
    Mutation(
        "pardoned once",
        always,
        (
            "actors/engine/test_accepted_requests.py::test_a_request_that_was_sent_with_others_is_no_cause_and_the_next_death_makes_suspects_of_all",
        ),
        "a request whose deadly work looks like a kill from outside kills one engine after another",
    ),
    Mutation(
        "a kill for its memory is not from outside",
        without_operand(2),
        (
            "actors/service/test_joint.py::test_the_gateway_is_told_once_whether_the_last_engine_was_killed_from_outside",
        ),
        "a request that takes all memory is sent again with all others",
    ),
    Mutation(
        "poison",
        never,
        POISON,
        "a client kills one engine after another with one request",
    ),
    Mutation(
        "no gap in a stream",
        never,
        ("proto/test_rpc.py::test_a_service_that_breaks_the_protocol_is_found_out",),
        "a text lacks a piece, and no error shows it",
    ),
    Mutation(
        "one final",
        never,
        ("actors/engine/test_accepted_requests.py::test_a_request_ends_once",),
        "a request is counted as ended twice",
    ),
    Mutation(
        "requests that wait for an engine",
        never,
        ("actors/engine/test_accepted_requests.py::test_what_arrives_before_an_engine_waits_for_it_within_a_bound",),
        "memory grows while there is no engine",
    ),
    Mutation(
        "hung engine",
        never,
        ("actors/engine/test_remote_batcher.py::test_an_engine_that_does_not_get_on_is_to_be_killed",),
        "a service is there and does nothing",
    ),
    Mutation(
        "deadline without an engine",
        dropped,
        ("actors/engine/test_remote_batcher.py::test_a_deadline_is_kept_while_there_is_no_engine",),
        "a caller waits longer than its deadline",
    ),
    Mutation(
        "callers that leave, at the link",
        dropped,
        ("actors/engine/test_remote_batcher.py::test_a_caller_that_leaves_cancels_its_request_over_there",),
        "the engine works for a request without a caller",
    ),
    Mutation(
        "draining takes nothing new, at the link",
        never,
        ("actors/engine/test_remote_batcher.py::test_a_drain_refuses_what_is_new_and_waits_for_what_is_open",),
        "a service that is to stop never does",
    ),
    Mutation(
        "a step that failed is undone",
        call_becomes("rollback", "{of}.commit()"),
        ("nif/test_context.py::test_a_forward_that_fails_leaves_no_trace",),
        "positions that were never computed count as evaluated",
    ),
    Mutation(
        "bisection of a step",
        never,
        (
            "actors/batcher/test_answers.py::test_a_step_that_fails_for_one_request_fails_that_request_alone",
            "actors/batcher/test_step_faults.py::test_when_nobodys_step_succeeds_the_engine_is_started_anew",
        ),
        "the wrong request is blamed",
    ),
    Mutation(
        "blame has an end",
        never,
        (
            "actors/batcher/test_step_faults.py::test_when_nobodys_step_succeeds_the_engine_is_started_anew",
            "actors/batcher/test_step_faults.py::test_requests_that_fail_one_after_another_are_blamed_so_often_only",
        ),
        "a broken engine fails request after request",
    ),
    Mutation(
        "rows that are no numbers",
        value_becomes("[True] * len(states)"),
        NAN_ROW,
        "a token is drawn from nothing",
    ),
    Mutation(
        "rows that are no numbers, greedy",
        call_becomes("isfinite", "np.ones_like({0}, dtype=bool)"),
        ("nif/sampling/test_sampler.py::test_a_row_whose_largest_is_no_number_fails_alone",),
        "a token is drawn from nothing",
    ),
    Mutation(
        "a sampler's fault fails its row alone",
        replaced_by("raise"),
        ("nif/sampling/test_sampler.py::test_a_sampler_that_raises_fails_its_row_alone",),
        "one bad row takes the tokens of all other rows",
    ),
    Mutation(
        "a sampler's fault fails its row alone, in an overlapped step too",
        replaced_by("raise"),
        (
            "nif/test_overlapped_run.py::"
            "test_a_sampler_that_raises_beside_others_fails_its_own_row_of_an_overlapped_run",
        ),
        "one bad row costs all others their step",
    ),
    Mutation(
        "a caller's function",
        catches_only("KeyError"),
        ("actors/batcher/test_answers.py::test_an_on_token_that_raises_ends_its_own_request_only",),
        "a bug of one caller stops the Batcher",
    ),
    Mutation(
        "the step under way is undone",
        dropped,
        ("nif/test_overlapped_run.py::test_a_run_that_is_closed_undoes_the_step_under_way",),
        "blocks of a step that is never read are lost",
    ),
    Mutation(
        "final tokens at the commit",
        only_then,
        (CHECKED,),
        "a prompt is taken for another text",
    ),
    Mutation(
        "a failed device ends the engine",
        never,
        ("actors/batcher/test_run_ahead.py::test_a_device_that_fails_in_a_step_under_way_starts_the_engine_anew",),
        "requests are tried on a device that cannot answer",
    ),
)
