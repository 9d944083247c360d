"""The demo: full attention, a window of the same bytes and CCA side by side on one model and one document."""
