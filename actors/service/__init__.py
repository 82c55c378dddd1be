"""A whole service: which processes it has, what runs in each. The only folder that knows all the others."""
