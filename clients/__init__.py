"""Ways to call the Batcher: in process, over ZeroMQ and msgpack-RPC, offline, and from the command line."""
