"""Choose how many tokens of a prompt go through a model at once."""

from typing import Any

import torch

from corecontext.config import CCAConfig
from corecontext.model_sizes import ModelSizes

MAX_CHUNK = {"cuda": 16384, "cpu": 4096}
"""Tokens of a chunk, over all rows, by kind of device. A larger chunk only costs memory: matrix
products saturate the device long before."""
HOST_CHUNK = 131072
"""The same on a GPU where a prompt fetches raw tokens from host memory: each chunk reads those of
all chunks before over the bus."""
SERVED_CHUNK = {"cuda": 2048, "cpu": 256}
"""Tokens of a prompt that a server reads between two steps of the requests that run: they wait
meanwhile."""
MEMORY_SHARE = 0.5
"""Share of the free memory for the activations of one chunk; the rest is for the cache."""


def choose_chunk_size(config: Any, dtype: torch.dtype, device: torch.device, batch: int) -> int:
    """Choose the tokens a row in one chunk of a prefill, at least 1: the limits above, or fewer
    where memory is short. `config` is a model's."""
    tokens = MAX_CHUNK["cuda" if device.type == "cuda" else "cpu"]
    cca = settings_of(config)
    if device.type == "cuda" and cca.fetches_from_host:
        tokens = HOST_CHUNK
    free = free_bytes(device)
    if free is not None:
        tokens = min(tokens, int(MEMORY_SHARE * free) // bytes_per_token(config, dtype))
    size = max(1, tokens // batch)
    return size if size < 256 else size // 256 * 256  # whole tiles


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Estimate the bytes of activations that one token of a chunk needs at the fullest moment of a
    layer.

    That is the larger of attention (queries, keys, values, output) and MLP (gate, up and their
    product), and beside it the residual stream, its normalised copy, the result that is added to
    it, and two float32 copies of a norm.
    """
    text = config.get_text_config(decoder=True)
    hidden = text.hidden_size
    sizes = ModelSizes.of(config)
    experts = getattr(text, "num_experts_per_tok", None) or 1
    inner = max(
        getattr(text, "intermediate_size", None) or 4 * hidden,
        experts * (getattr(text, "moe_intermediate_size", None) or 0),
    )
    # Queries and keys before and after rotary, values twice, output.
    heads = 3 * sizes.query_heads + 4 * sizes.kv_heads
    attention = heads * sizes.head_dim
    return dtype.itemsize * (3 * hidden + max(attention, 3 * inner)) + 2 * 4 * hidden


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that PyTorch could still allocate on a GPU, its own unused reserve included;
    None elsewhere."""
    if device.type != "cuda":
        return None
    free = torch.cuda.mem_get_info(device)[0]
    # Not `memory_allocated` and `memory_reserved`: for each number PyTorch sorts all its counts.
    counts = torch.cuda.memory_stats_as_nested_dict(device)
    used = counts["allocated_bytes"]["all"]["current"]
    return free + counts["reserved_bytes"]["all"]["current"] - used


def settings_of(config: Any) -> CCAConfig:
    """Return CCA's settings in a model's config; without any, those of full attention: g = 1."""
    settings = getattr(config, "cca", None)
    return CCAConfig.from_dict(settings) if settings else CCAConfig.paper(1)
