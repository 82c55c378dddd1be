"""What keeps a GPU's streams from using the same memory without an order."""

from tests.mutations.mutation import Mutation

LAUNCHES, TRANSFER = "nif/runners/launches.py", "nif/runners/block_transfer.py"
ORDER = "nif/runners/test_stream_order.py::"
OVERLAPPED = (f"{ORDER}test_h15_overlapped_steps_whose_tables_grow_are_ordered",)
SWAPPED = (
    f"{ORDER}test_h16_a_step_that_writes_over_what_leaves_is_ordered",
    f"{ORDER}test_h16_blocks_swapped_beside_running_steps_are_ordered",
)

GPU_GUARDS = (
    Mutation(
        "a step's input is memory of the stream that writes it",
        LAUNCHES,
        "            with self._copies.open():\n                # Allocated",
        "            inputs = pair.inputs_of(size)\n            with self._copies.open():\n                # Allocated",
        OVERLAPPED,
        "the running step's temporaries are written over",
    ),
    Mutation(
        "a step waits for its input",
        LAUNCHES,
        "            self._copies.hold_up_compute()\n",
        "",
        OVERLAPPED,
        "a step computes over the input of another",
    ),
    Mutation(
        "tokens are read when they have arrived",
        LAUNCHES,
        "            self._arrived.synchronize()\n",
        "            pass\n",
        OVERLAPPED,
        "a caller gets another step's tokens",
    ),
    Mutation(
        "staging memory is filled when it has been copied",
        "nif/runners/launches.py",
        "            stage.copied.synchronize()\n",
        "            pass\n",
        (f"{ORDER}test_chunks_of_a_prompt_that_nobody_waits_for_are_ordered",),
        "a chunk is computed over the input of the next",
    ),
    Mutation(
        "blocks leave after the step that wrote them",
        TRANSFER,
        "        self._stream.wait_for_compute()\n        with self._stream.open():",
        "        with self._stream.open():",
        SWAPPED,
        "a sequence comes back without its last positions",
    ),
    Mutation(
        "a step waits until what it writes over is gathered",
        TRANSFER,
        "                self._stream.hold_up_compute()\n",
        "",
        SWAPPED,
        "a sequence comes back with another's positions",
    ),
    Mutation(
        "blocks come back after who read what was there",
        TRANSFER,
        "                self._stream.wait_for_compute()  # kernels under way may read what these blocks held before\n",
        "",
        SWAPPED,
        "a running step reads a block that changes",
    ),
    Mutation(
        "a step waits until its blocks are back",
        TRANSFER,
        "        self._stream.hold_up_compute()\n\n    def finish",
        "\n    def finish",
        SWAPPED,
        "a step reads blocks that have not arrived",
    ),
)
