"""A whole service: its processes, and the parts in each process. Only this folder knows all the others."""
