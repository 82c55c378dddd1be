"""The flight recorder: what a Batcher was told, in a file from which it is played again."""
