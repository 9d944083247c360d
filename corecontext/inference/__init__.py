"""Engine: prompts in chunks (prefill.py, chunk_size.py), captured steps (session.py), sampling,
limits, bytes of a server's rows (room.py), settings by load (policy.py)."""

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
