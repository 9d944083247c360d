"""Other efficient attentions under the contract of ours: enable, train or generate, disable."""

from corecontext.baselines.configs import (
    NAMES,
    DuoAttention,
    LMInfinite,
    LongLoRA,
    MInference,
    Pattern,
    StreamingLLM,
    WindowOnly,
    make_rival,
)
from corecontext.baselines.plugin import enable, enabled, rival_of
from corecontext.baselines.search import read_patterns, search_patterns, write_patterns

__all__ = [
    "NAMES",
    "DuoAttention",
    "LMInfinite",
    "LongLoRA",
    "MInference",
    "Pattern",
    "StreamingLLM",
    "WindowOnly",
    "enable",
    "enabled",
    "make_rival",
    "read_patterns",
    "rival_of",
    "search_patterns",
    "write_patterns",
]
