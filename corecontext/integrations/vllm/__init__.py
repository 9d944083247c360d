"""Serve models with Core Context Aware attention in vLLM."""
