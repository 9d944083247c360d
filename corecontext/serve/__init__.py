"""OpenAI-compatible server: scheduler.py, rows of cache and their bytes (rows.py, memory.py),
shared beginnings (prefix.py), HTTP, metrics."""
