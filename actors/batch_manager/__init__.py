"""The batch manager of TensorRT-LLM as a facade over the Batcher."""
