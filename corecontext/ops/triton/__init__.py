"""Triton kernels for GPUs. Nothing imports this folder before a call asks for it: see
`ops/api.py`."""
