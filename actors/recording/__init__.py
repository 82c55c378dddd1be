"""The flight recorder: a Batcher's inputs in a file, from which they can be replayed."""
