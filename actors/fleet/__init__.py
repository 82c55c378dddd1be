"""Several replicas of one model: the choice of a replica for each request, and recovery from a replica's death."""
