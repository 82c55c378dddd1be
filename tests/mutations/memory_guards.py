"""What keeps one sequence's memory from another's, and strange files out."""

from tests.mutations.mutation import Mutation

POOL, TABLES, CACHE = "nif/kv/block_pool.py", "nif/kv/block_tables.py", "nif/kv/prefix_cache.py"
MACHINE = "nif/kv/test_kv_cache_machine.py::test_h07_h11_h12_no_sequence_ever_reads_or_leaks_another_ones_blocks"
COPY = ("nif/kv/test_kv_cache.py::test_a_copy_shares_whole_blocks_and_copies_the_last_on_write", MACHINE)
FOREIGN = ("nif/test_context.py::test_a_damaged_or_foreign_saved_sequence_is_refused",)

MEMORY_GUARDS = (
    Mutation(
        "reference count at release",
        POOL,
        "            if self.references[block] == 0:\n                if",
        "            if True:\n                if",
        ("nif/kv/test_block_pool.py::test_a_block_returns_when_its_last_holder_releases_it", MACHINE),
        "a block is given away that somebody reads",
    ),
    Mutation(
        "blocks come back",
        TABLES,
        "            pool.release(table[first:])\n",
        "            pass\n",
        ("nif/kv/test_kv_cache.py::test_the_tail_can_be_removed_and_written_again", MACHINE),
        "every sequence that ends takes blocks along",
    ),
    Mutation(
        "copy on write",
        TABLES,
        "return block if self.pools[group].references[block] > 1 else None",
        "return None",
        COPY,
        "a sequence writes over what another reads",
    ),
    Mutation(
        "copies share",
        TABLES,
        "            for block in shared:\n                pool.share(block)\n",
        "",
        COPY,
        "a block is free while two tables show it",
    ),
    Mutation(
        "content that changes loses its name",
        "nif/kv/reservation.py",
        "                tables.pools[group].drop_hash(table[-1])\n",
        "                pass\n",
        ("nif/kv/test_kv_cache.py::test_the_tail_can_be_removed_and_written_again", MACHINE),
        "a prompt finds a block that holds something else",
    ),
    Mutation(
        "tenant in the hash",
        CACHE,
        "return sha256(_ROOT + key).digest()",
        "return sha256(_ROOT).digest()",
        ("nif/kv/test_kv_cache.py::test_h11_tenants_do_not_find_each_others_blocks",),
        "the time to a first token tells what others asked",
    ),
    Mutation(
        "tenant in the key",
        "actors/batching/intake.py",
        "cache_key=prefix_key(wanted.tenant)",
        'cache_key=prefix_key("")',
        ("actors/batching/test_batcher.py::test_tenants_do_not_find_each_others_prompts",),
        "the time to a first token tells what others asked",
    ),
    Mutation(
        "parent in the hash",
        CACHE,
        "return sha256(parent + array(",
        "return sha256(array(",
        ("nif/kv/test_prefix_cache.py::test_h11_the_same_tokens_after_other_tokens_do_not_match",),
        "a block stands for tokens it was not computed after",
    ),
    Mutation(
        "content from outside is not shared",
        "nif/kv/kv_cache.py",
        "        sequence.key = key\n        if key is not None and",
        '        sequence.key = key or b""\n        if key is not None and',
        ("nif/kv/test_kv_cache.py::test_content_from_outside_never_reaches_another_sequence",),
        "a session file's KV reaches another's prompt",
    ),
    Mutation(
        "integrity check",
        POOL,
        "assert counted == expected,",
        "assert True,",
        ("nif/kv/test_block_pool.py::test_integrity_names_a_wrong_reference_count",),
        "a leak is never noticed",
    ),
    Mutation(
        "a slot forgets",
        "nif/context.py",
        "self._samplers.pop(seq_id, None)",
        "None",
        ("nif/test_context.py::test_a_slot_forgets_its_last_users_sampling",),
        "the next user has the last one's sampling",
    ),
    Mutation(
        "token ids of an entry",
        "nif/context.py",
        "                if not 0 <= token < width:",
        "                if False:",
        ("nif/test_context.py::test_a_bad_entry_is_refused_and_changes_nothing",),
        "an id beyond the vocabulary reads other memory",
    ),
    Mutation(
        "identity of a session file",
        "nif/kv/sequence_state.py",
        'if metadata.get("format") != FORMAT or metadata.get("identity") != identity:',
        'if metadata.get("format") != FORMAT:',
        FOREIGN,
        "another model's KV is read as this one's",
    ),
    Mutation(
        "digest of a session file",
        "clients/cli/session_file.py",
        "len(state) == head.state_bytes and hashlib.sha256(state).hexdigest() == head.state_sha256",
        "True",
        ("clients/cli/test_chat_session.py::test_a_damaged_state_is_told_and_not_used",),
        "KV that was cut short or changed is used",
    ),
    Mutation(
        "no pickled weights",
        "nif/models/model_source.py",
        "    if single.is_file() or index.is_file():\n        return\n",
        "    return\n",
        ("nif/models/test_model_source.py::test_pickled_weights_are_refused",),
        "a model's file runs code",
    ),
    Mutation(
        "no pickles fetched",
        "nif/models/model_source.py",
        '_SNAPSHOT_PATTERNS = ["*.safetensors",',
        '_SNAPSHOT_PATTERNS = ["*.bin", "*.safetensors",',
        ("nif/models/test_model_source.py::test_a_hugging_face_id_is_fetched_without_pickles_or_code",),
        "a model's file runs code",
    ),
    Mutation(
        "no code of a model",
        "nif/models/model.py",
        "AutoConfig.from_pretrained(directory, trust_remote_code=False)",
        "AutoConfig.from_pretrained(directory, trust_remote_code=True)",
        ("nif/models/test_model.py::test_code_from_the_directory_is_never_run",),
        "a model's file runs code",
    ),
    Mutation(
        "room for all that was swapped",
        "actors/batching/slots.py",
        "                owner.donor = None  # it comes back whole: a plan must find room for all of it",
        "                pass",
        (
            "simulation/test_staged_faults.py::"
            "test_a_choice_that_was_swapped_out_comes_back_when_there_is_room_for_all_of_it",
        ),
        "every step is undone for one that has no room, and the service stands still",
    ),
)
