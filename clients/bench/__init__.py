"""Loads with fixed seeds against any service, and what its callers see of them."""
