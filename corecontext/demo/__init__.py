"""The demo: full attention and CCA side by side on one small model and one document."""
