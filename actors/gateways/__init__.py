"""The gateways, by which other processes reach the Batcher."""
