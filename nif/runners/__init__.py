"""Forward passes in torch and Triton over the paged cache."""
