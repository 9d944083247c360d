"""Decoding kernels: one step of the compact cache, with and without fetch."""
