"""Kernels for GPUs: backend.py is their surface, tiles.py their sizes; nothing imports this folder
before a call asks for it (ops/api.py)."""
