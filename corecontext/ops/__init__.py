"""Operators: the public functions (api), the reference, backends, fetch/, kernels (triton/)."""
