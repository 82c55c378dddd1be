"""What keeps strangers out: keys, tokens, certificates, and where a service may listen without them."""
