"""Operators: pooling and attention, with one file for each way of computing them."""
