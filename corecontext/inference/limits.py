"""Bounds of a request: a model's positions, the chunk that memory allows, and errors that say what
would fit."""

from __future__ import annotations

from typing import Any

import torch

from corecontext.config import CCAConfig
from corecontext.cost import entry_bytes, store_bytes
from corecontext.model_sizes import ModelSizes

MAX_CHUNK = {"cuda": 16384, "cpu": 2048}
"""Tokens (over all rows) beyond which a larger chunk only costs memory: matrix products are
saturated long before."""
HOST_CHUNK = 65536
"""The same on a GPU where a prompt fetches raw tokens from host memory: each chunk reads those of
all chunks before over the bus."""
SERVED_CHUNK = {"cuda": 2048, "cpu": 256}
"""Tokens of a prompt that a server reads between two steps of the requests that run: they wait
meanwhile."""
CACHE_SHARE = 0.8
"""Share of a GPU's free memory that a server gives to its caches."""
MEMORY_SHARE = 0.5  # of the free memory, for one chunk's activations; the rest is for the cache


def position_limit(config: Any) -> int | None:
    """Return the most positions that a model was built for, tokens; None where its config does not
    say.

    Some checkpoints state `max_position_embeddings` before their rotary scaling and some after it,
    so the larger of the two readings counts: `factor` times the length it scales, or the plain
    number.

    Args:
        config: A Hugging Face config.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope  # models with several kinds of layers nest them
    factor = rope.get("factor") or 1.0
    return max(limit, int(factor * (rope.get("original_max_position_embeddings") or limit)))


def check_length(config: Any, prompt: int, new: int = 0) -> None:
    """Raise ValueError where a prompt and its new tokens, in tokens a row, exceed the model's
    positions."""
    limit = position_limit(config)
    if limit is not None and prompt + new > limit:
        more = f" and {new} new ones" if new else ""
        raise ValueError(
            f"input_ids must fit the model's {limit} positions, got {prompt} tokens{more}. Shorten "
            "the prompt, or load the model with a rope scaling (config.rope_parameters) that "
            "reaches further."
        )


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Estimate the bytes of activations that one token of a chunk needs at the fullest moment of a
    layer.

    The larger of attention (queries, keys, values, output) and MLP (gate, up and their product)
    next to the residual stream, its normalised copy and a norm's float32 copies.
    """
    text = config.get_text_config(decoder=True)
    hidden = text.hidden_size
    sizes = ModelSizes.of(config)
    experts = getattr(text, "num_experts_per_tok", None) or 1
    inner = max(
        getattr(text, "intermediate_size", None) or 4 * hidden,
        experts * (getattr(text, "moe_intermediate_size", None) or 0),
    )
    heads = 3 * sizes.query_heads + 4 * sizes.kv_heads  # before and after rotary
    attention = heads * sizes.head_dim
    return dtype.itemsize * (3 * hidden + max(attention, 3 * inner)) + 2 * 4 * hidden


def cache_bytes_per_token(config: Any, dtype: torch.dtype) -> float:
    """Estimate the bytes on the device that each token of a long prompt adds to the cache over all
    layers: core tokens, the store of fetch, and raw tokens where full attention reads the prompt.

    The window and the first tokens are left out: they do not grow.
    """
    sizes = ModelSizes.of(config)
    cca = _settings(config)
    token = entry_bytes(cca, sizes.head_dim, dtype.itemsize) / cca.group_size
    # A long text, over which the slots of fetch, whose number is fixed, add next to nothing.
    length = 2**24
    token += store_bytes(cca, length, sizes.head_dim, dtype.itemsize).device / length
    if cca.prefill == "full" and not cca.fetch_groups:
        token += 2 * sizes.head_dim * dtype.itemsize
    return sizes.layers * sizes.kv_heads * token


def _settings(config: Any) -> CCAConfig:
    """Return the settings of a model's attention, those of full attention where it has none."""
    settings = getattr(config, "cca", None)
    return CCAConfig.from_dict(settings) if settings else CCAConfig.paper(1)


def host_bytes_of(config: Any, dtype: torch.dtype, cca: CCAConfig, length: int) -> int:
    """Count the bytes in host memory of a row of `length` tokens over all layers, under CCA's
    settings."""
    sizes = ModelSizes.of(config)
    # Every layer and head keeps all raw tokens, whatever its g.
    host = store_bytes(cca, length, sizes.head_dim, dtype.itemsize).host
    return sizes.layers * sizes.kv_heads * host


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that PyTorch could still allocate on a GPU, its own unused reserve included;
    None elsewhere."""
    if device.type != "cuda":
        return None
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve


def choose_chunk_size(config: Any, dtype: torch.dtype, device: torch.device, batch: int) -> int:
    """Choose the tokens a row in one chunk of a prefill, at least 1: as many as saturate the
    device, or fewer where memory is short."""
    tokens = MAX_CHUNK["cuda" if device.type == "cuda" else "cpu"]
    cca = _settings(config)
    if device.type == "cuda" and cca.store == "host" and cca.fetch_groups and cca.prefill != "cca":
        tokens = HOST_CHUNK
    free = free_bytes(device)
    if free is not None:
        tokens = min(tokens, int(MEMORY_SHARE * free) // bytes_per_token(config, dtype))
    size = max(1, tokens // batch)
    return size if size < 256 else size // 256 * 256  # whole tiles


def rounded_up(length: int) -> int:
    """Round a length up, by an eighth at most, to one of few lengths: a power of two or one of
    seven steps to the next."""
    step = max(64, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def whole_does_not_fit(config: Any, dtype: torch.dtype, length: int, free: int) -> str:
    """Return the message for a prompt that was read at once and ran out of memory.

    Args:
        length: Tokens of the prompt.
        free: Bytes that were free before.
    """
    token_bytes = bytes_per_token(config, dtype) + cache_bytes_per_token(config, dtype)
    fits = min(int(free / token_bytes), int(0.8 * length))
    return (
        f"input_ids must fit the device's memory, got {length} tokens and ran out with "
        f"{free / 2**30:.2f} GiB free before. About {fits} tokens fit at once. Shorten the prompt, "
        "give a chunk_size, or use method cca."
    )


def does_not_fit(
    batch: int, length: int, chunk: int, done: int, free: int, chunk_bytes: int, token_bytes: float
) -> str:
    """Return the message for a prefill that ran out of memory: the sizes that would have fitted.

    Args:
        batch, length: Rows of the prompt, and tokens a row.
        chunk, done: Tokens a row in one chunk, and tokens a row that had been read.
        free: Bytes that were free when the prefill began.
        chunk_bytes: Activations of one chunk of all rows, bytes.
        token_bytes: Bytes that the cache takes per token a row (all rows together).
    """
    head = (
        f"input_ids must fit the device's memory, got {batch} x {length} tokens in chunks of "
        f"{chunk}: it ran out after {done} tokens a row with {free / 2**30:.2f} GiB free before. "
    )
    if chunk_bytes > free and chunk > 1:
        return head + f"About chunk_size={max(1, int(0.8 * chunk * free / chunk_bytes))} would fit."
    fits = int(max(0, free - chunk_bytes) / token_bytes)
    if fits >= length:
        # By these numbers it should have fitted: activations were larger than estimated.
        return head + f"Give a smaller chunk_size, about {max(1, chunk // 2)}, or fewer rows."
    rows = int(batch * fits / length)
    fewer_rows = ""
    if 0 < rows < batch:
        fewer_rows = f", or {rows} row{'s' * (rows > 1)} of {length}"
    return head + (
        f"About {fits} tokens a row fit with {batch} row{'s' * (batch > 1)}{fewer_rows}. "
        "Or take a larger group_size or a smaller chunk_size."
    )
