"""Rival methods under the contract of ours, one file each; rivals.py lists them."""

from corecontext.baselines.duo_attention import DuoAttention
from corecontext.baselines.hook import enable, enabled, rival_of
from corecontext.baselines.lm_infinite import LMInfinite
from corecontext.baselines.longlora import LongLoRA
from corecontext.baselines.method import Method
from corecontext.baselines.minference import MInference, Pattern
from corecontext.baselines.pattern_search import read_patterns, search_patterns, write_patterns
from corecontext.baselines.rivals import NAMES, RIVALS, make_rival
from corecontext.baselines.streaming_llm import StreamingLLM
from corecontext.baselines.window import WindowOnly

__all__ = [
    "NAMES",
    "RIVALS",
    "DuoAttention",
    "LMInfinite",
    "LongLoRA",
    "MInference",
    "Method",
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
