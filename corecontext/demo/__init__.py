"""The demo: full attention, a window of the same bytes and CCA on one model and one document."""
