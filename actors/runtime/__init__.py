"""Actors on trio: GenServer, mailbox, monitors, supervisors, a worker thread, telemetry. Knows nothing of batching."""
