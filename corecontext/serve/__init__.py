"""OpenAI-compatible server: scheduler, cache rows, HTTP, metrics (docs/serving.md)."""
