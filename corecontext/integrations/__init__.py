"""Plug-ins: transformers (enable, model families, caches), lm-evaluation-harness, vLLM."""
