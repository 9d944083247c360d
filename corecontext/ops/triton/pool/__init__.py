"""Pooling kernels: groups of keys and values into core tokens, and their masses."""
