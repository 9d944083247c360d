"""Operators: the public functions (api), backends, pooling rules (rules), kernels (triton/)."""
