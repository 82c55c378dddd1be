"""The native layer: model context, paged KV cache, forward passes, sampling; synchronous, no event loop."""
