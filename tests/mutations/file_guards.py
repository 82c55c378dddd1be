"""What keeps harm in a model's files from memory and answers (ADR 37)."""

from tests.mutations.mutation import Mutation, call_becomes, dropped, never

FILES = "nif/models/test_file_checks.py::"
TOKENIZERS = "nif/text/test_tokenizer_process.py::"

FILE_GUARDS = (
    Mutation(
        "finite numbers of a configuration",
        never,
        (FILES + "test_a_number_that_cannot_be_is_refused_before_anything_is_built",),
        "an infinite number reaches a kernel",
    ),
    Mutation(
        "highest numbers of a configuration",
        never,
        (FILES + "test_a_number_that_cannot_be_is_refused_before_anything_is_built",),
        "transformers counts to 10**12 while it makes a configuration",
    ),
    Mutation(
        "sizes of a configuration",
        never,
        (FILES + "test_a_number_that_cannot_be_is_refused_before_anything_is_built",),
        "a module of negative sizes is made",
    ),
    Mutation(
        "heads are shared out",
        never,
        (FILES + "test_a_number_that_cannot_be_is_refused_before_anything_is_built",),
        "heads read keys of no head",
    ),
    Mutation(
        "padding within the vocabulary",
        never,
        (FILES + "test_a_number_that_cannot_be_is_refused_before_anything_is_built",),
        "the fault of a file is an error of torch",
    ),
    Mutation(
        "epsilons of a configuration",
        never,
        (FILES + "test_a_number_that_cannot_be_is_refused_before_anything_is_built",),
        "every answer is token 0",
    ),
    Mutation(
        "a damaged description",
        never,
        ("nif/models/test_warm_model.py::test_a_damaged_description_is_named_once_and_made_anew",),
        "a torn file in the cache makes another model of the same weights",
    ),
    Mutation(
        "a damaged head of kept weights",
        never,
        ("nif/native/test_kept_weights.py::test_every_part_of_a_head_counts",),
        "a torn head makes structs with pointers to anywhere",
    ),
    Mutation(
        "weights of another model",
        never,
        ("nif/native/test_kept_weights.py::test_weights_of_another_model_under_this_name_are_not_used",),
        "a copied file serves another model's weights",
    ),
    Mutation(
        "damaged weights",
        never,
        ("nif/native/test_kept_weights.py::test_damaged_weights_are_named_once_and_packed_anew",),
        "a bit that the disk has turned changes every answer",
    ),
    Mutation(
        "weights that the disk cannot read",
        never,
        ("nif/native/test_kept_weights.py::test_weights_that_cannot_be_read_do_not_end_the_process",),
        "a broken disk ends each engine that starts",
    ),
    Mutation(
        "the bound of kept weights",
        never,
        ("nif/native/test_kept_weights.py::test_weights_above_the_bound_are_not_kept_and_no_others_make_room",),
        "packed weights fill the disk",
    ),
    Mutation(
        "one writer of kept weights at a time",
        call_becomes("FileLock", "suppress()"),
        ("nif/native/test_kept_weights.py::test_a_second_writer_waits_for_the_first_and_writes_nothing",),
        "two starting engines remove each other's files, and neither is kept",
    ),
    Mutation(
        "one process makes room for blocks at a time",
        call_becomes("FileLock", "suppress()"),
        ("nif/kv/test_disk_cache.py::test_while_another_process_makes_room_no_block_is_removed",),
        "two processes remove twice as many blocks as they must",
    ),
    Mutation(
        "a block that was overwritten during the copy",
        never,
        ("nif/kv/test_disk_cache.py::test_a_block_that_loses_its_content_during_the_copy_is_not_written",),
        "another prompt's keys and values get this block's name",
    ),
    Mutation(
        "a block that others could have written",
        never,
        ("nif/kv/test_disk_cache.py::test_a_block_that_others_could_have_written_is_a_miss",),
        "another user sets the model's state",
    ),
    Mutation(
        "a damaged block",
        never,
        ("nif/kv/test_disk_cache.py::test_a_damaged_block_is_a_miss_and_is_removed",),
        "a torn write changes answers",
    ),
    Mutation(
        "other files in the folder of the prefix cache",
        never,
        ("nif/kv/test_disk_cache.py::test_other_files_of_the_operators_folder_stay_and_are_not_counted",),
        "the operator's own files are removed",
    ),
    Mutation(
        "a name is no path",
        never,
        ("clients/test_sessions.py::test_a_name_is_no_path",),
        "a client writes outside the operator's folder",
    ),
    Mutation(
        "the bound of sessions",
        never,
        ("actors/batcher/test_session_files.py::test_the_tenant_with_the_most_loses_its_oldest_session",),
        "sessions fill the disk",
    ),
    Mutation(
        "a session that others could have written",
        never,
        ("actors/batcher/test_session_files.py::test_a_damaged_or_foreign_file_is_refused",),
        "another user sets the model's state",
    ),
    Mutation(
        "a damaged session",
        never,
        ("actors/batcher/test_session_files.py::test_a_damaged_or_foreign_file_is_refused",),
        "a torn session changes answers",
    ),
    Mutation(
        "sessions in memory",
        never,
        ("clients/test_sessions.py::test_too_many_files_at_a_time_are_refused_and_a_failed_call_counts_no_more",),
        "a client fills the memory with sessions",
    ),
    Mutation(
        "end tokens within the logits",
        never,
        (FILES + "test_an_end_token_is_a_whole_number_within_the_logits_width",),
        "the first request stops the batcher",
    ),
    Mutation(
        "unused tensors",
        dropped,
        (FILES + "test_a_tensor_that_nobody_would_use_is_refused_by_name",),
        "a damaged name changes the text without a word",
    ),
    Mutation(
        "missing tensors",
        never,
        (FILES + "test_a_tensor_that_nobody_would_use_is_refused_by_name",),
        "the fault of a file is a KeyError",
    ),
    Mutation(
        "shapes of tensors",
        never,
        (FILES + "test_a_shape_of_a_family_without_an_architecture_is_checked_before_the_load",),
        "memory is taken for a module that its files cannot fill",
    ),
    Mutation(
        "module much larger than its files",
        never,
        (FILES + "test_a_number_that_cannot_be_is_refused_before_anything_is_built",),
        "a small file takes all memory",
    ),
    Mutation(
        "finite weights",
        never,
        (FILES + "test_a_weight_that_is_not_finite_is_refused_by_its_name_at_the_load",),
        "NaN is found at each request",
    ),
    Mutation(
        "size of a JSON file",
        never,
        (FILES + "test_a_json_file_without_an_end_is_refused",),
        "a file takes all memory",
    ),
    Mutation(
        "a process for a tokenizer with expressions of its own",
        never,
        (TOKENIZERS + "test_only_what_may_take_long_has_a_process_of_its_own",),
        "one text holds a thread of the engine for hours",
    ),
    Mutation(
        "a decoder with expressions of its own",
        dropped,
        (TOKENIZERS + "test_a_decoder_with_an_expression_is_refused_by_name",),
        "one token holds the engine for hours",
    ),
    Mutation(
        "time to load a tokenizer with expressions of its own",
        dropped,
        (TOKENIZERS + "test_a_model_that_takes_too_long_to_load_its_tokenizer_is_refused",),
        "the load of a model takes hours",
    ),
    Mutation(
        "ids of tokens",
        dropped,
        (TOKENIZERS + "test_an_id_beyond_every_vocabulary_is_refused",),
        "a tokenizer with an id of 2**31 takes minutes to load",
    ),
    Mutation(
        "a text model's configuration",
        never,
        (FILES + "test_a_text_config_where_its_kind_of_model_has_none_is_refused",),
        "a configuration ends the load with an AttributeError",
    ),
    Mutation(
        "pipes in the place of files",
        never,
        (FILES + "test_a_pipe_or_a_device_in_the_place_of_a_file_is_refused",),
        "the load of a model waits for ever",
    ),
)
