"""The native layer: model context, paged KV cache, forward passes and sampling; synchronous, no event loop."""
