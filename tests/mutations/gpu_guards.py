"""What keeps a GPU's streams from using the same memory without an order."""

from tests.mutations.mutation import Mutation, dropped, preceded_by

ORDER = "nif/runners/test_stream_order.py::"
OVERLAPPED = (f"{ORDER}test_h15_overlapped_steps_whose_tables_grow_are_ordered",)
SWAPPED = (
    f"{ORDER}test_h16_a_step_that_writes_over_what_leaves_is_ordered",
    f"{ORDER}test_h16_blocks_swapped_beside_running_steps_are_ordered",
)

GPU_GUARDS = (
    Mutation(
        "a step's input is memory of the stream that writes it",
        preceded_by("inputs = pair.inputs_of(size)"),
        OVERLAPPED,
        "the running step's temporaries are written over",
    ),
    Mutation(
        "a step waits for its input",
        dropped,
        OVERLAPPED,
        "a step computes over the input of another",
    ),
    Mutation(
        "tokens are read when they have arrived",
        dropped,
        OVERLAPPED,
        "a caller gets another step's tokens",
    ),
    Mutation(
        "the next step reads the tokens that were drawn again",
        dropped,
        (
            "nif/runners/test_launches.py::"
            "test_rows_that_depend_on_the_output_are_drawn_again_as_single_steps_draw_them",
        ),
        "a step continues a token that no caller got",
    ),
    Mutation(
        "staging memory is filled when it has been copied",
        dropped,
        (f"{ORDER}test_chunks_of_a_prompt_that_nobody_waits_for_are_ordered",),
        "a chunk is computed over the input of the next",
    ),
    Mutation(
        "blocks leave after the step that wrote them",
        dropped,
        SWAPPED,
        "a sequence comes back without its last positions",
    ),
    Mutation(
        "a step waits until the blocks that it overwrites are gathered",
        dropped,
        SWAPPED,
        "a sequence comes back with another's positions",
    ),
    Mutation(
        "blocks come back after earlier reads of their place",
        dropped,
        SWAPPED,
        "a running step reads a block that changes",
    ),
    Mutation(
        "a step waits until its blocks are back",
        dropped,
        SWAPPED,
        "a step reads blocks that have not arrived",
    ),
)
