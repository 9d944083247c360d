"""Fetch raw tokens of the best groups, which an index chooses, into the same softmax
(docs/fetch.md)."""
