"""What keeps one sequence's memory from another's, and strange files out."""

from tests.mutations.mutation import (
    Mutation,
    always,
    argument_becomes,
    call_becomes,
    dropped,
    expression_becomes,
    never,
    only_left,
    only_right,
    text_becomes,
    value_becomes,
    without_operand,
)

MACHINE = "nif/kv/test_kv_cache_machine.py::test_h07_h11_h12_no_sequence_ever_reads_or_leaks_another_ones_blocks"
COPY = ("nif/kv/test_kv_cache.py::test_a_copy_shares_whole_blocks_and_copies_the_last_on_write", MACHINE)
FOREIGN = ("nif/test_context.py::test_a_damaged_or_foreign_saved_sequence_is_refused",)

MEMORY_GUARDS = (
    Mutation(
        "blocks of wrong drafts come back",
        dropped,
        ("nif/test_decode_run.py::test_checked_drafts_leave_what_single_steps_leave", MACHINE),
        "sequences hold blocks that the planner does not know of",
    ),
    Mutation(
        "reference count at release",
        always,
        ("nif/kv/test_block_pool.py::test_a_block_returns_when_its_last_holder_releases_it", MACHINE),
        "a block is reused while a sequence reads it",
    ),
    Mutation(
        "blocks come back",
        dropped,
        ("nif/kv/test_kv_cache.py::test_the_tail_can_be_removed_and_written_again", MACHINE),
        "every sequence that ends takes blocks along",
    ),
    Mutation(
        "copy on write",
        value_becomes("None"),
        COPY,
        "a sequence overwrites a block that another one reads",
    ),
    Mutation(
        "copies share",
        dropped,
        COPY,
        "a block is free while two tables show it",
    ),
    Mutation(
        "a hit needs the whole window",
        always,
        (
            "nif/kv/test_prefix_cache.py::test_a_window_needs_its_own_blocks_before_the_end_of_a_hit_and_no_others",
            MACHINE,
        ),
        "a prompt attends to a foreign block",
    ),
    Mutation(
        "content that changes loses its name",
        dropped,
        (
            "nif/kv/test_kv_cache.py::"
            "test_a_block_that_is_written_again_without_room_for_a_copy_is_known_for_its_new_content_only",
            MACHINE,
        ),
        "a prompt finds a block that holds something else",
    ),
    Mutation(
        "a tail that changes loses its name",
        dropped,
        ("nif/kv/test_kv_cache.py::test_a_tail_that_is_written_over_is_not_found",),
        "a prompt's end finds a block that holds something else",
    ),
    Mutation(
        "tenant in the hash",
        only_left,
        ("nif/kv/test_kv_cache.py::test_h11_tenants_do_not_find_each_others_blocks",),
        "the time to a first token reveals other tenants' prompts",
    ),
    Mutation(
        "tenant in the key",
        argument_becomes("prefix_key", 0, '""'),
        ("actors/batcher/test_batcher.py::test_tenants_do_not_find_each_others_prompts",),
        "the time to a first token reveals other tenants' prompts",
    ),
    Mutation(
        "adapter in the key",
        call_becomes("prefix_key", "prefix_key({0})"),
        ("actors/batcher/test_adapters.py::test_no_adapter_finds_what_another_has_left",),
        "a request goes on from what another adapter has computed",
    ),
    Mutation(
        "configured prompts have no adapter",
        expression_becomes("prompt.pinned and adapter is None", "prompt.pinned"),
        ("actors/batcher/test_adapters.py::test_held_prompts_are_held_for_one_adapter",),
        "a request with an adapter goes on from what was computed without one",
    ),
    Mutation(
        "parent in the hash",
        only_right,
        ("nif/kv/test_prefix_cache.py::test_h11_the_same_tokens_after_other_tokens_do_not_match",),
        "a block stands for tokens it was not computed after",
    ),
    Mutation(
        "content from outside is not shared",
        value_becomes('{0} or b""'),
        ("nif/kv/test_kv_cache.py::test_content_from_outside_never_reaches_another_sequence",),
        "a session file's KV reaches another's prompt",
    ),
    Mutation(
        "integrity check",
        dropped,
        ("nif/kv/test_block_pool.py::test_integrity_names_a_wrong_reference_count",),
        "a leak is never noticed",
    ),
    Mutation(
        "a slot forgets",
        dropped,
        ("nif/test_context.py::test_a_slot_forgets_its_last_users_half_of_a_code_point",),
        "the next user's text begins with the last one's end",
    ),
    Mutation(
        "token ids of an entry",
        never,
        ("nif/test_context.py::test_a_bad_entry_is_refused_and_changes_nothing",),
        "an id beyond the vocabulary reads other memory",
    ),
    Mutation(
        "identity of a session file",
        without_operand(1),
        FOREIGN,
        "another model's KV is read as this one's",
    ),
    Mutation(
        "digest of a session file",
        value_becomes("True"),
        ("clients/cli/test_chat.py::test_a_damaged_state_is_told_and_not_used",),
        "KV that was cut short or changed is used",
    ),
    Mutation(
        "no pickled weights",
        always,
        ("nif/models/test_model_source.py::test_pickled_weights_are_refused",),
        "a model's file runs code",
    ),
    Mutation(
        "no pickles fetched",
        value_becomes("[*{0}, '*.bin']"),
        ("nif/models/test_model_source.py::test_a_hugging_face_id_is_fetched_without_pickles_or_code",),
        "a model's file runs code",
    ),
    Mutation(
        "damaged downloads",
        never,
        ("nif/models/test_hub.py::test_a_damaged_file_is_refused_and_downloaded_anew",),
        "a model has wrong weights",
    ),
    Mutation(
        "no code of a model",
        argument_becomes("from_pretrained", "trust_remote_code", "True"),
        ("nif/models/test_model.py::test_code_from_the_directory_is_never_run",),
        "a model's file runs code",
    ),
    Mutation(
        "room for all that was swapped",
        dropped,
        (
            "simulation/test_staged_faults.py::"
            "test_a_choice_that_was_swapped_out_comes_back_when_there_is_room_for_all_of_it",
        ),
        "every step is undone for one that has no room, and the service stands still",
    ),
    Mutation(
        "own block of a family's member",
        text_becomes("(shorter - 1) / c->block_size", "shorter / c->block_size"),
        ("nif/native/test_families.py::test_the_block_that_a_sequence_writes_is_never_shared",),
        "a sequence reads keys behind its own end",
    ),
    Mutation(
        "evicted blocks of a family's member",
        text_becomes("entry->query_len == 1 && entry->kv_len <= window", "entry->query_len == 1"),
        ("nif/native/test_families.py::test_prefill_and_what_a_window_hides_stay_alone",),
        "blocks that a window has given away are read as if they were shared",
    ),
)
