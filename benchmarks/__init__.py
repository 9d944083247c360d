"""Measurements: each file asks one question."""
