"""Plug-ins: transformers (hf/), vLLM (vllm/), lm-evaluation-harness (lm_eval.py)."""
