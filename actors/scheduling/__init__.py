"""Choose the requests that run in the next step: pure, replaceable functions over requests and KV resources."""
