"""`corecontext demo`: one small model, one document, full attention and CCA side by side at the
same weights."""
