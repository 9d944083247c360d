"""Attend to sinks and a window in blocks of queries: memory grows linearly with the length.

Masks and scores exist for one block at a time.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from corecontext.baselines import chunks
from corecontext.ops.rotary import Rotary
from corecontext.ops.torch_attention import scaled_attention

ROWS = 1024
"""Queries of one block."""


class Scoring(NamedTuple):
    """How a product of query and key becomes a score."""

    scale: float
    softcap: float | None = None


class Sinks(NamedTuple):
    """The first tokens of each row, and where a query sees them once they have left its window."""

    k: Tensor
    """[B, Hkv, n, D]; tokens that no query sees may hold anything."""
    v: Tensor
    far_position: str = "none"
    """Position of a sink that has left the window. "none": its own. "cache": as in a cache of n +
    window_size tokens, i for sink i, and at most n + window_size - 1 for the query. "ceiling":
    `window_size` before the query."""
    rotary: Rotary | None = None
    """How keys were rotated; needed unless far_position is "none"."""


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat KV heads for their query heads: [B, Hkv, S, D] to [B, H, S, D]."""
    if x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], 1)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Return softmax attention under a mask, [B, H, T, D] on [B, Hkv, S, D].

    Memory for a gradient does not grow with T x S.

    Args:
        mask: True where a query sees a key, [1 or B, 1 or H, T, S].
    """
    heads = q.shape[1]
    repeats = q.shape[1] // k.shape[1]
    if scoring.softcap is not None:
        args = (q, expand_heads(k, heads), expand_heads(v, heads), mask, scoring)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return checkpoint(_capped, *args, use_reentrant=False)
        return _capped(*args)
    # The r query heads of a KV head become r T queries of it, so no key is copied.
    if mask.shape[1] > 1:
        mask = mask.unflatten(1, (-1, repeats)).flatten(2, 3)
    else:
        mask = mask.repeat(1, 1, repeats, 1)
    q = q.unflatten(1, (-1, repeats)).flatten(2, 3)  # [B, Hkv, r T, D]
    out = scaled_attention(q, k, v, attn_mask=mask, scale=scoring.scale)
    return out.unflatten(2, (repeats, -1)).flatten(1, 2)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Return masked attention with capped scores, which torch's own attention does not have."""
    scale, softcap = scoring
    scores = softcap * torch.tanh((q @ k.mT).float() * (scale / softcap))
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Sinks,
    window_size: int,
    scoring: Scoring,
    first: int = 0,
    pads: Tensor | None = None,
) -> Tensor:
    """Let each query see its nearest `window_size` tokens, and the sinks that have left the window:
    [B, H, T, D].

    Args:
        q: Queries of slots first .. first + T - 1, [B, H, T, D], rotary applied; a slot is a column
            of the batch, padding included.
        k, v: Tokens of the last S slots, the queries' own among them, [B, Hkv, S, D].
        pads: [B], padded slots before each row; positions count from there. None means no padding.
    """
    num_queries = q.shape[2]
    num_keys = k.shape[2]
    num_sinks = sinks.k.shape[2]
    num_slots = first + num_queries
    # PyTorch's causal mask aligns the first query with the first key, so there must be as many
    # queries as keys; a single query needs no mask.
    is_torch_causal = num_queries in (1, num_keys)
    if pads is None and num_slots <= window_size and is_torch_causal and not scoring.softcap:
        # No token has left a window: plain causal attention.
        k = expand_heads(k, q.shape[1])
        v = expand_heads(v, q.shape[1])
        is_causal = num_queries > 1
        return scaled_attention(q, k, v, is_causal=is_causal, scale=scoring.scale)
    if pads is None and num_queries == num_keys == num_slots and not scoring.softcap:
        return _whole_prompt(q, k, v, sinks, window_size, scoring.scale)
    slots = torch.arange(first, num_slots, device=q.device)
    positions = slots[None]  # of the queries, [1 or B, T]
    if pads is not None:
        positions = positions - pads[:, None]
    sinks = _with_far_keys(sinks)
    outs = []
    for low in range(0, num_queries, ROWS):
        high = min(low + ROWS, num_queries)
        # The window: keys that a query of this block sees.
        begin = max(0, num_keys - num_queries + low - window_size + 1)
        end = num_keys - num_queries + high
        key_slots = torch.arange(begin, end, device=q.device) + num_slots - num_keys
        distance = slots[low:high, None] - key_slots  # [queries of the block, keys]
        mask = ((distance >= 0) & (distance < window_size))[None]
        if pads is not None:
            # No padding is seen, but by a padded query: itself, so that it sees something.
            mask = (mask & (positions[:, low:high, None] >= distance)) | (distance == 0)
        block = (q[:, :, low:high], k[:, :, begin:end], v[:, :, begin:end])
        # Sinks once they have left the window.
        if num_sinks and first + high > window_size:
            sink_slots = torch.arange(num_sinks, device=q.device)
            far = positions[:, low:high, None] - sink_slots >= window_size
            mask = torch.cat((mask, far), -1)
            block = _with_sinks(*block, sinks, window_size, positions[:, low:high])
        out = masked_attention(*block, mask[:, None], scoring)
        # `_with_sinks` may have widened the heads, and the values by zeros.
        outs.append(out[..., : q.shape[3]])
    return torch.cat(outs, 2)


def _whole_prompt(
    q: Tensor, k: Tensor, v: Tensor, sinks: Sinks, window_size: int, scale: float
) -> Tensor:
    """Attend in prompts without padding and without tokens before them, by chunks.py."""
    batch_size, kv_heads, length, _ = k.shape
    sink_q = q[:, :, window_size:]
    if sinks.k.shape[2]:
        sinks = _with_far_keys(sinks)
        positions = torch.arange(window_size, length, device=q.device)[None]
        sink_q = _far_queries(sink_q, sinks, window_size, positions)
    # [B, H, ...] becomes [N, r, ...], and [B, Hkv, ...] becomes [N, 1, ...].
    q, sink_q = (x.unflatten(1, (kv_heads, -1)).flatten(0, 1) for x in (q, sink_q))
    tokens = [x.flatten(0, 1)[:, None] for x in (k, v, sinks.k, sinks.v)]
    prompt = chunks.Prompt(q, *tokens[:2], sink_q, *tokens[2:])
    out = chunks.attend(prompt, window_size, scale)
    return out.unflatten(0, (batch_size, kv_heads)).flatten(1, 2)


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Sinks, window_size: int, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Append the sinks to a block's keys and values; return q, k, v.

    Unless far_position is "none", a query is rotated otherwise for sinks than for the window. To
    put both kinds of scores into one softmax, heads become twice as wide: the first half of a
    sink's key is zero, and the second half of a window's.
    """
    if sinks.far_position == "none":
        return q, torch.cat((k, sinks.k), 2), torch.cat((v, sinks.v), 2)
    size = q.shape[3]
    return (
        torch.cat((q, _far_queries(q, sinks, window_size, positions)), -1),
        torch.cat((F.pad(k, (0, size)), F.pad(sinks.k, (size, 0))), 2),
        F.pad(torch.cat((v, sinks.v), 2), (0, size)),
    )


def _far_queries(q: Tensor, sinks: Sinks, window_size: int, positions: Tensor) -> Tensor:
    """Rotate queries at positions [1 or B, T] to the positions that `far_position` gives them."""
    if sinks.far_position == "none":
        return q
    limit = window_size
    if sinks.far_position == "cache":
        limit += sinks.k.shape[2] - 1
    return _rotate(q, positions.clamp(max=limit) - positions, sinks.rotary)


def _with_far_keys(sinks: Sinks) -> Sinks:
    """Rotate all sinks to position 0 under "ceiling"; `_far_queries` are at `window_size`."""
    if sinks.far_position != "ceiling":
        return sinks
    back = -torch.arange(sinks.k.shape[2], device=sinks.k.device)[None]
    return sinks._replace(k=_rotate(sinks.k, back, sinks.rotary))


def _rotate(x: Tensor, offsets: Tensor, rotary: Rotary) -> Tensor:
    """Rotate x [B, heads, n, D] by offsets [1 or B, n] positions, in float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    rows = [rotary.rotate(row, offset) for row, offset in zip(wide.chunk(len(offsets)), offsets)]
    return torch.cat(rows).to(x.dtype)
