"""Kernels over block tables: attention and pooling in pages."""
