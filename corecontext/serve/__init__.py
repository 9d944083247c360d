"""OpenAI-compatible server: scheduler.py, rows of cache within a budget (rows.py, memory.py),
shared beginnings (prefix.py), HTTP, metrics."""
