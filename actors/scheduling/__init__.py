"""Which requests run in the next step: pure functions over requests and KV resources, swappable."""
