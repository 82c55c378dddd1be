"""The GPU kernels in Triton, each with its plain-torch twin."""
