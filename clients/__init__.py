"""Ways to call the Batcher: in process, over ZeroMQ, and from the command line."""
