"""What an operator sees of a service: its log, its metrics, traces of its requests."""
