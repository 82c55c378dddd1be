"""The engine in a process of its own, and its link to the gateways."""
