"""The demo: full attention, CCA and fetch side by side on one model and one document."""
