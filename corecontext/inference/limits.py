"""Bounds of a request: a model's positions, bytes of its cache, and errors that say what would
fit."""

from typing import Any

import torch

from corecontext.config import CCAConfig
from corecontext.cost import entry_bytes, store_bytes
from corecontext.inference.chunk_size import bytes_per_token, settings_of
from corecontext.model_sizes import ModelSizes

CACHE_SHARE = 0.8
"""Share of a GPU's free memory that a server gives to its caches."""
HOST_SHARES = {"cuda": 0.75, "cpu": 0.5}
"""Share of the available host memory for raw tokens of fetch in a server, by device. Beside a GPU
all other caches are on it."""


def position_limit(config: Any) -> int | None:
    """Return the most tokens that a model has positions for; None where its config does not say.

    `max_position_embeddings` is the length before rotary scaling in some checkpoints, after it in
    others. So the larger reading counts: the number itself, or `factor` times the length before.

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


def cache_bytes_per_token(config: Any, dtype: torch.dtype) -> float:
    """Estimate the bytes on the device that each token of a long prompt adds to the cache over all
    layers: core tokens, the store of fetch, and raw tokens where full attention reads the prompt.

    The window and the first tokens are left out: they do not grow.
    """
    sizes = ModelSizes.of(config)
    cca = settings_of(config)  # without CCA: g = 1, whose core tokens are all tokens
    token = entry_bytes(cca, sizes.head_dim, dtype.itemsize) / cca.group_size
    # A long text, over which the slots of fetch, whose number is fixed, add next to nothing.
    length = 2**24
    token += store_bytes(cca, length, sizes.head_dim, dtype.itemsize).device / length
    if cca.keeps_raw_while_reading:
        token += 2 * sizes.head_dim * dtype.itemsize
    return sizes.layers * sizes.kv_heads * token


def host_bytes_of(config: Any, dtype: torch.dtype, cca: CCAConfig, length: int) -> int:
    """Count the bytes in host memory of a row of `length` tokens over all layers, under CCA's
    settings."""
    sizes = ModelSizes.of(config)
    # Every layer and head keeps all raw tokens, whatever its g.
    host = store_bytes(cca, length, sizes.head_dim, dtype.itemsize).host
    return sizes.layers * sizes.kv_heads * host


def rounded_up(length: int) -> int:
    """Round a length up to one of few: a power of two, or one of seven equal steps to the next.
    That adds less than an eighth; below 512 tokens, where steps are 64, less than 64."""
    step = _step(length)
    return -(-length // step) * step


def rounded_down(length: int) -> int:
    """Round a length down to one that `rounded_up` leaves as it is; below 64 tokens to 0."""
    step = _step(length)
    return length // step * step


def _step(length: int) -> int:
    """Return the tokens between a length's neighbours to which it is rounded."""
    return max(64, 1 << max(0, length.bit_length() - 4))


def whole_does_not_fit(config: Any, dtype: torch.dtype, length: int, free: int) -> str:
    """Return the message for a prompt that was read at once and ran out of memory.

    Args:
        length: Tokens of the prompt.
        free: Bytes that were free before.
    """
    token_bytes = bytes_per_token(config, dtype) + cache_bytes_per_token(config, dtype)
    # Sizes are estimates: 0.8 leaves room, here and below.
    fits = min(int(free / token_bytes), int(0.8 * length))
    return (
        f"input_ids must fit the device's memory, got {length} tokens and ran out with "
        f"{free / 2**30:.2f} GiB free before. About {fits} tokens fit at once. Shorten the prompt, "
        "give a chunk_size, or use method cca."
    )


def does_not_fit(
    batch: int, length: int, chunk: int, done: int, free: int, chunk_bytes: int, token_bytes: float
) -> str:
    """Return the message for a prefill that ran out of memory: it names sizes that would fit.

    Args:
        batch, length: Rows of the prompt, and tokens a row.
        chunk, done: Tokens a row in one chunk, and tokens a row that had been read.
        free: Bytes that were free when the prefill began.
        chunk_bytes: Activations of one chunk of all rows, bytes.
        token_bytes: Bytes that one token more in each row adds to the cache, over all rows.
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
