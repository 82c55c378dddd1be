"""The engine in a process of its own, and what joins it to the gateways."""
