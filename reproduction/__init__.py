"""Reproduce the paper's tables and figures, in miniature or on a checkpoint
(docs/reproduction.md)."""
