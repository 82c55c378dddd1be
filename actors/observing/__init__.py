"""Observability: the log, the metrics, and traces of requests."""
