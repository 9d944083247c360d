"""Training and evaluation data: files, token ids, packed rows and synthetic retrieval."""
