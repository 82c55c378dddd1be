"""Loads with fixed seeds against any service, and the latencies that callers see."""
