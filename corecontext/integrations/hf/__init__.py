"""CCA in Hugging Face models: enable, model families (attention_interface.py), caches, files in
GGUF and their rotation."""
