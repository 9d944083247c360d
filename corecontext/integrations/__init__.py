"""Plug-ins: transformers (enable, model families, caches) and lm-evaluation-harness."""
