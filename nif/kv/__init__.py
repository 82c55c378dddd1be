"""The paged KV cache: blocks, tables, prefix cache, offloading, sizing."""
