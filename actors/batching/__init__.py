"""The Batcher: the actor that owns the context and serves every caller."""
