"""Attention, pooling and fetch over block tables, the pages of vLLM's cache."""
