"""The Batcher: the actor that owns the model context and serves every caller."""
