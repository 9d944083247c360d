"""Whole-model inference: a prompt in chunks of bounded memory, then a static step per token
(docs/design.md)."""

from corecontext.inference.engine import Engine
from corecontext.inference.policy import Load, Policy, TablePolicy
from corecontext.inference.prefill import Prefilled, prefill
from corecontext.inference.sampling import Sampling
from corecontext.inference.stream import Stream

__all__ = ["Engine", "Load", "Policy", "Prefilled", "Sampling", "Stream", "TablePolicy", "prefill"]
