"""An OpenAI-compatible server: many users on one model, with g and s that follow the load
(docs/serving.md)."""
