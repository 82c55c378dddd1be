"""The CPU kernels in C, and the runner that calls them."""
