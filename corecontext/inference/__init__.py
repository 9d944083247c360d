"""Whole-model inference: a prompt in chunks of bounded memory, then a static step per token (docs/design.md)."""

from corecontext.inference.engine import Engine, Stream
from corecontext.inference.policy import Load, Policy, TablePolicy
from corecontext.inference.prefill import Prefilled, prefill
from corecontext.inference.sampling import Sampling

__all__ = ["Engine", "Load", "Policy", "Prefilled", "Sampling", "Stream", "TablePolicy", "prefill"]
