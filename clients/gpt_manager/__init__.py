"""TensorRT-LLM's batch manager as a facade over the Batcher."""
