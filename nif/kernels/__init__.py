"""GPU kernels in Triton. Each kernel has a plain-torch twin, with which tests compare it."""
