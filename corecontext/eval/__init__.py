"""Evaluate a checkpoint from local files: perplexity, questions; inspect its attention."""
