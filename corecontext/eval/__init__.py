"""Evaluations of a checkpoint from files on disk, resumable, item by item (docs/evaluation.md)."""
