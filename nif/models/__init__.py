"""Finding, converting, loading and checking a model."""
