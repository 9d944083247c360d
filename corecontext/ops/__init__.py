"""Operators: signatures (api.py), the specification (reference.py), plain PyTorch (packed.py,
partial.py), gradients (autograd.py)."""
