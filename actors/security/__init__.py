"""Access control: keys, tokens, certificates, and the addresses where a service may listen without them."""
