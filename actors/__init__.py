"""The actor runtime, the Batcher actor, its schedulers and gateways, and the supervision tree."""
