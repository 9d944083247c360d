"""Attention in blocks of query rows: masks and scores exist for one block at a time, so memory is
linear."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from corecontext.ops.rotary import Rotary

ROWS = 1024
"""Query rows of one block."""
SPAN = 16 * ROWS
"""Query rows that a window alone takes at once: they need their keys twice."""


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """[B, Hkv, S, D] to [B, H, S, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Softmax attention under a mask [T, S] or [1 or B, 1 or H, T, S] (True where seen); memory for
    a gradient does not grow with T x S."""
    repeats = q.shape[1] // k.shape[1]
    if (
        softcap is None and mask is not None and repeats > 1
    ):  # a KV head's query heads are more rows: no key is copied
        mask = mask[None, None] if mask.dim() == 2 else mask
        many = mask.shape[1] > 1
        folded = (
            mask.unflatten(1, (-1, repeats)).flatten(2, 3)
            if many
            else mask.repeat(1, 1, repeats, 1)
        )
        out = F.scaled_dot_product_attention(
            q.unflatten(1, (-1, repeats)).flatten(2, 3), k, v, attn_mask=folded, scale=scale
        )
        return out.unflatten(2, (repeats, -1)).flatten(1, 2)
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return checkpoint(_capped, q, k, v, mask, scale, softcap, use_reentrant=False)
    return _capped(q, k, v, mask, scale, softcap)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """The same with capped scores, which torch's own attention does not have."""
    scores = softcap * torch.tanh((q @ k.mT).float() * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Full causal attention of the last T of S tokens, [B, H, T, D] on [B, Hkv, S, D]."""
    new, seen = q.shape[2], k.shape[2]
    if new == 1:
        return masked_attention(q, k, v, None, scale, softcap)
    if new == seen and softcap is None:
        return F.scaled_dot_product_attention(
            q, expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1]), is_causal=True, scale=scale
        )
    return _in_blocks(
        q,
        lambda a, b: (
            k[:, :, : seen - new + b],
            v[:, :, : seen - new + b],
            _causal(seen - new + a, seen - new + b, 0, q.device),
        ),
        scale,
        softcap,
    )


def _causal(first: int, end: int, first_key: int, device: torch.device) -> Tensor:
    """Mask of queries first .. end - 1 on keys first_key .. end - 1."""
    return (
        torch.arange(first_key, end, device=device)
        <= torch.arange(first, end, device=device)[:, None]
    )


def _in_blocks(
    q: Tensor,
    keys_of: Callable[[int, int], tuple[Tensor, Tensor, Tensor]],
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention block by block; `keys_of(a, b)` gives keys, values and mask of query rows a .. b -
    1."""
    parts = []
    for start in range(0, q.shape[2], ROWS):
        end = min(start + ROWS, q.shape[2])
        k, v, mask = keys_of(start, end)
        parts.append(masked_attention(q[:, :, start:end], k, v, mask, scale, softcap))
    return torch.cat(parts, 2)


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    *,
    first: int,
    window_size: int,
    pads: Tensor | None = None,
    far_position: str = "none",
    rotary: Rotary | None = None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Each query sees its nearest `window_size` tokens, and of the first n tokens those that have
    left the window.

    Where such a sink stands is the method's choice: "none" leaves keys as they are; "cache" counts
    positions inside a cache of n + window_size tokens, so that the query stands at most at n +
    window_size - 1 and sink i at i; "ceiling" puts every sink `window_size` before the query.

    Args:
        q: Queries of slots first .. first + T - 1, [B, H, T, D], rotary applied.
        k, v: Tokens of the last S slots, the queries' own among them, [B, Hkv, S, D].
        sink_k, sink_v: Each row's first tokens, [B, Hkv, n, D]; those that no query sees may hold
            anything.
        pads: [B], padded slots before each row; positions count from there. None means no padding.
        rotary: How keys were rotated; needed unless far_position is "none".

    Returns:
        [B, H, T, D].
    """
    new, seen, num_sinks = q.shape[2], k.shape[2], sink_k.shape[2]
    if first == 0 and new == seen and not num_sinks and pads is None:
        return window_attention(q, k, v, window_size, scale, softcap)
    slots = torch.arange(first, first + new, device=q.device)
    positions = slots[None] if pads is None else slots[None] - pads[:, None]  # [1 or B, T]
    turned_k = sink_k
    if num_sinks and far_position == "ceiling":
        turned_k = _turn(sink_k, -torch.arange(num_sinks, device=q.device)[None], rotary)
    parts = []
    for a in range(0, new, ROWS):
        b = min(a + ROWS, new)
        begin = max(0, seen - new + a - window_size + 1)
        end = seen - new + b
        distance = slots[a:b, None] - torch.arange(
            first + new - seen + begin, first + new - seen + end, device=q.device
        )
        near = ((distance >= 0) & (distance < window_size))[None]
        if pads is not None:  # a padded query sees itself, so that its softmax is over something
            near = (near & (positions[:, a:b, None] >= distance)) | (distance == 0)
        block_q, block_k, block_v = q[:, :, a:b], k[:, :, begin:end], v[:, :, begin:end]
        if num_sinks and first + b > window_size:
            far = positions[:, a:b, None] - torch.arange(num_sinks, device=q.device) >= window_size
            rows = max(len(near), len(far))
            mask = torch.cat((near.expand(rows, -1, -1), far.expand(rows, -1, -1)), -1)
            if far_position == "none":
                block_k = torch.cat((block_k, sink_k), 2)
                block_v = torch.cat((block_v, sink_v), 2)
            else:  # two kinds of scores in one softmax: heads twice as wide, each half zero for the other kind
                limit = num_sinks + window_size - 1 if far_position == "cache" else window_size
                moved = positions[:, a:b].clamp(max=limit) - positions[:, a:b]
                block_q = torch.cat((block_q, _turn(block_q, moved, rotary)), -1)
                block_k = torch.cat(
                    (F.pad(block_k, (0, q.shape[3])), F.pad(turned_k, (q.shape[3], 0))), 2
                )
                block_v = F.pad(torch.cat((block_v, sink_v), 2), (0, q.shape[3]))
        else:
            mask = near
        parts.append(
            masked_attention(block_q, block_k, block_v, mask[:, None], scale, softcap)[
                ..., : q.shape[3]
            ]
        )
    return torch.cat(parts, 2)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window_size: int, scale: float, softcap: float | None = None
) -> Tensor:
    """Each query of a whole sequence sees its nearest `window_size` tokens: [B, H, L, D] on [B,
    Hkv, L, D].

    Queries go in blocks as long as the window, each with its own block of keys and the one before:
    of what is computed, half is seen.
    """
    length = q.shape[2]
    if window_size >= length:
        return dense_attention(q, k, v, scale, softcap)
    block = -(-max(window_size, 128) // 64) * 64
    span = max(1, SPAN // block) * block
    distance = torch.arange(block, device=q.device)[:, None] - torch.arange(
        -block, block, device=q.device
    )
    mask = (distance >= 0) & (distance < window_size)
    parts = [
        masked_attention(
            q[:, :, :block],
            k[:, :, :block],
            v[:, :, :block],
            mask[:length, block : block + length],
            scale,
            softcap,
        )
    ]
    for start in range(block, length, span):
        end = min(start + span, length)
        blocks = [
            F.pad(x[:, :, first:end], (0, 0, 0, (start - end) % block))
            .unflatten(2, (-1, block))
            .transpose(1, 2)
            for x, first in ((q, start), (k, start - block), (v, start - block))
        ]
        rows, keys, values = (
            x.flatten(0, 1)
            for x in (blocks[0], *(torch.cat((x[:, :-1], x[:, 1:]), 3) for x in blocks[1:]))
        )
        out = masked_attention(rows, keys, values, mask, scale, softcap).unflatten(0, (len(q), -1))
        parts.append(out.transpose(1, 2).flatten(2, 3)[:, :, : end - start])
    return torch.cat(parts, 2)


def _turn(x: Tensor, offsets: Tensor, rotary: Rotary | None) -> Tensor:
    """x [B, heads, n, D] turned by offsets [1 or B, n] positions, in float32."""
    if rotary is None:
        raise ValueError("rotary must be given for positions inside the cache, got None.")
    wide = x if x.dtype == torch.float64 else x.float()
    rows = [rotary.turn(part, offset) for part, offset in zip(wide.chunk(len(offsets)), offsets)]
    return torch.cat(rows).to(x.dtype)


def shifted_attention(
    q: Tensor, k: Tensor, v: Tensor, group_size: int, scale: float, softcap: float | None = None
) -> Tensor:
    """Causal attention inside groups of tokens; in the second half of the heads groups begin half a
    group earlier."""
    heads, half = q.shape[1] // 2, group_size // 2
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    plain = _grouped(q[:, :heads], k[:, :heads], v[:, :heads], group_size, scale, softcap)
    parts = [
        _grouped(
            q[:, heads:, span], k[:, heads:, span], v[:, heads:, span], group_size, scale, softcap
        )
        for span in (slice(0, group_size - half), slice(group_size - half, None))
        if span.start < q.shape[2]
    ]
    return torch.cat((plain, torch.cat(parts, 2)), 1)


def _grouped(
    q: Tensor, k: Tensor, v: Tensor, group_size: int, scale: float, softcap: float | None
) -> Tensor:
    """Causal attention inside groups counted from the first token; the last group may be
    shorter."""
    batch, heads, length, _ = q.shape
    rest = -length % group_size  # zeros at the end are later than every token
    q, k, v = (
        F.pad(x, (0, 0, 0, rest)).unflatten(2, (-1, group_size)).transpose(1, 2).flatten(0, 1)
        for x in (q, k, v)
    )
    out = dense_attention(q, k, v, scale, softcap)
    return out.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[:, :, :length]
