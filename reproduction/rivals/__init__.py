"""Compare compressed contexts: kvpress's presses, and this package's caches."""
