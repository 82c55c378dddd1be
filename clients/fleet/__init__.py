"""A gateway over several replicas, and the replicas as Ray's actors."""
