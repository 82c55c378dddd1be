"""How the Batcher is reached from outside this process."""
