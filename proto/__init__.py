"""The wire: messages, codec, framing and a sans-IO msgpack-RPC; knows no sockets and no event loop."""
