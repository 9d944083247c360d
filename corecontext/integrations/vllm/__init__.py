"""CCA in vLLM: settings it takes (model_settings.py), caches in pages, attention from them
(paged_backend.py)."""
