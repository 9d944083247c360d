"""Pooling of groups of keys and values into core tokens, with their masses, and its backward."""
