"""Engine: generate with whole models; prompts in chunks, captured decoding steps, policies."""

from corecontext.inference.engine import Engine
from corecontext.inference.policy import Load, Policy, TablePolicy
from corecontext.inference.prefill import Prefilled, prefill
from corecontext.inference.sampling import Sampling
from corecontext.inference.stream import Generation, Stream

__all__ = [
    "Engine",
    "Generation",
    "Load",
    "Policy",
    "Prefilled",
    "Sampling",
    "Stream",
    "TablePolicy",
    "prefill",
]
