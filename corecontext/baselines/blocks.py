"""Compute attention in blocks of query rows, so that memory grows linearly with the length.

Masks and scores exist for one block at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from corecontext.ops.rotary import Rotary

ROWS = 1024
"""Query rows of one block."""
SPAN = 16 * ROWS
"""Query rows that window attention takes at once: they need their keys twice."""


class Scoring(NamedTuple):
    """How a product of query and key becomes a score."""

    scale: float
    softcap: float | None = None


class Sinks(NamedTuple):
    """The first tokens of each row, and the position of those that have left a query's window."""

    k: Tensor
    """[B, Hkv, n, D]; tokens that no query sees may hold anything."""
    v: Tensor
    far_position: str = "none"
    """"none" leaves keys as they are. "cache" counts positions inside a cache of n + window_size
    tokens: sink i is at i, the query at most at n + window_size - 1. "ceiling" puts every sink
    `window_size` before the query."""
    rotary: Rotary | None = None
    """How keys were rotated; needed unless far_position is "none"."""


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat KV heads for their query heads: [B, Hkv, S, D] to [B, H, S, D]."""
    if x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], 1)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """Return softmax attention under a mask, [B, H, T, D] on [B, Hkv, S, D].

    Memory for a gradient does not grow with T x S.

    Args:
        mask: True where a query sees a key, [T, S] or [1 or B, 1 or H, T, S]; None shows all keys.
    """
    heads, repeats = q.shape[1], q.shape[1] // k.shape[1]
    if scoring.softcap is not None:
        args = (q, expand_heads(k, heads), expand_heads(v, heads), mask, scoring)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return checkpoint(_capped, *args, use_reentrant=False)
        return _capped(*args)
    if mask is None or repeats == 1:
        k, v = expand_heads(k, heads), expand_heads(v, heads)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale)
    # The query heads of a KV head become more rows of it, so no key is copied.
    if mask.dim() == 2:
        mask = mask[None, None]
    if mask.shape[1] > 1:
        mask = mask.unflatten(1, (-1, repeats)).flatten(2, 3)
    else:
        mask = mask.repeat(1, 1, repeats, 1)
    rows = q.unflatten(1, (-1, repeats)).flatten(2, 3)
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scoring.scale)
    return out.unflatten(2, (repeats, -1)).flatten(1, 2)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Return masked attention with capped scores, which torch's own attention does not have."""
    scale, softcap = scoring
    assert softcap is not None
    scores = softcap * torch.tanh((q @ k.mT).float() * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Return full causal attention of the last T of S tokens, [B, H, T, D] on [B, Hkv, S, D]."""
    new, seen = q.shape[2], k.shape[2]
    if new == 1:
        return masked_attention(q, k, v, None, scoring)
    if new == seen and scoring.softcap is None:
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scoring.scale)
    outs = []
    for start in range(0, new, ROWS):
        rows = q[:, :, start : start + ROWS]
        end = seen - new + start + rows.shape[2]
        slots = torch.arange(end, device=q.device)
        mask = slots <= slots[-rows.shape[2] :, None]
        outs.append(masked_attention(rows, k[:, :, :end], v[:, :, :end], mask, scoring))
    return torch.cat(outs, 2)


def window_attention(q: Tensor, k: Tensor, v: Tensor, window_size: int, scoring: Scoring) -> Tensor:
    """Let each query of a whole sequence see its nearest `window_size` tokens.

    Queries go in blocks as long as the window, each with its own block of keys and the one before:
    half of the computed scores are seen.

    Args:
        q, k, v: [B, H, L, D] and [B, Hkv, L, D].
    """
    length = q.shape[2]
    if window_size >= length:
        return dense_attention(q, k, v, scoring)
    block = -(-max(window_size, 128) // 64) * 64
    span = max(1, SPAN // block) * block
    rows = torch.arange(block, device=q.device)[:, None]
    distance = rows - torch.arange(-block, block, device=q.device)
    mask = (distance >= 0) & (distance < window_size)

    # The first block has none before it.
    first = [x[:, :, :block] for x in (q, k, v)]
    outs = [masked_attention(*first, mask[:length, block : block + length], scoring)]
    for start in range(block, length, span):
        end = min(start + span, length)
        queries, *keys_values = (
            F.pad(x[:, :, first:end], (0, 0, 0, (start - end) % block))
            .unflatten(2, (-1, block))
            .transpose(1, 2)  # [B, blocks, heads, block, D]
            for x, first in ((q, start), (k, start - block), (v, start - block))
        )
        pairs = [torch.cat((x[:, :-1], x[:, 1:]), 3).flatten(0, 1) for x in keys_values]
        out = masked_attention(queries.flatten(0, 1), *pairs, mask, scoring)
        out = out.unflatten(0, (len(q), -1)).transpose(1, 2).flatten(2, 3)
        outs.append(out[:, :, : end - start])
    return torch.cat(outs, 2)


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
    """Let each query see its nearest `window_size` tokens, and the sinks that have left the window.

    Args:
        q: Queries of slots first .. first + T - 1, [B, H, T, D], rotary applied.
        k, v: Tokens of the last S slots, the queries' own among them, [B, Hkv, S, D].
        pads: [B], padded slots before each row; positions count from there. None means no padding.

    Returns:
        [B, H, T, D].
    """
    new, seen, num_sinks = q.shape[2], k.shape[2], sinks.k.shape[2]
    if first == 0 and new == seen and not num_sinks and pads is None:
        return window_attention(q, k, v, window_size, scoring)
    slots = torch.arange(first, first + new, device=q.device)
    positions = slots[None]  # [1 or B, T]
    if pads is not None:
        positions = positions - pads[:, None]
    if num_sinks and sinks.far_position == "ceiling":
        back = -torch.arange(num_sinks, device=q.device)[None]
        sinks = sinks._replace(k=_rotate(sinks.k, back, sinks.rotary))
    outs = []
    for a in range(0, new, ROWS):
        b = min(a + ROWS, new)
        # The window: keys that a query of this block sees.
        begin, end = max(0, seen - new + a - window_size + 1), seen - new + b
        key_slots = torch.arange(begin, end, device=q.device) + first + new - seen
        distance = slots[a:b, None] - key_slots
        mask = ((distance >= 0) & (distance < window_size))[None]
        if pads is not None:  # a padded query sees itself, so that its softmax is over something
            mask = (mask & (positions[:, a:b, None] >= distance)) | (distance == 0)
        block = (q[:, :, a:b], k[:, :, begin:end], v[:, :, begin:end])
        # Sinks once they have left the window.
        if num_sinks and first + b > window_size:
            sink_slots = torch.arange(num_sinks, device=q.device)
            far = positions[:, a:b, None] - sink_slots >= window_size
            mask = torch.cat((mask, far), -1)
            block = _with_sinks(*block, sinks, window_size, positions[:, a:b])
        out = masked_attention(*block, mask[:, None], scoring)
        outs.append(out[..., : q.shape[3]])
    return torch.cat(outs, 2)


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Sinks, window_size: int, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Append the sinks to a block's keys and values.

    Sinks at positions of their own need queries rotated for them alone. To put both kinds of scores
    into one softmax, heads become twice as wide, each half zero for the other kind.
    """
    if sinks.far_position == "none":
        return q, torch.cat((k, sinks.k), 2), torch.cat((v, sinks.v), 2)
    size, limit = q.shape[3], window_size
    if sinks.far_position == "cache":
        limit += sinks.k.shape[2] - 1
    rotated = _rotate(q, positions.clamp(max=limit) - positions, sinks.rotary)
    return (
        torch.cat((q, rotated), -1),
        torch.cat((F.pad(k, (0, size)), F.pad(sinks.k, (size, 0))), 2),
        F.pad(torch.cat((v, sinks.v), 2), (0, size)),
    )


def _rotate(x: Tensor, offsets: Tensor, rotary: Rotary | None) -> Tensor:
    """Rotate x [B, heads, n, D] by offsets [1 or B, n] positions, in float32."""
    if rotary is None:
        raise ValueError("rotary must be given for positions inside the cache, got None.")
    wide = x if x.dtype == torch.float64 else x.float()
    rows = [rotary.rotate(row, offset) for row, offset in zip(wide.chunk(len(offsets)), offsets)]
    return torch.cat(rows).to(x.dtype)
