"""Several replicas of one model: who serves a request, and what happens when a replica dies."""
