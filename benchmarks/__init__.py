"""Measure speed and memory: one question a file; columns are in *_tables.py."""
