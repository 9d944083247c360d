"""CCA attention inside Hugging Face models: enable, model families, caches, files in GGUF."""
