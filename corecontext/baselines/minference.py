"""Sparse reading of a prompt: each head computes only the keys that its pattern picks (MInference,
arXiv 2407.02490).

A query at t sees a key at j <= t if

- a_shape: j is one of the first tokens, or t - j is inside the window;
- vertical_slash: j is one of the picked columns, or block(t) - block(j) is one of the picked
  diagonals; both are those with most attention of the prompt's last queries;
- block_sparse: block(j) is one of the key blocks with the largest products of mean query and mean
  key, for block(t).

Blocks are counted from the first token of the row. Work is done one block of queries at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from corecontext.baselines.blocks import expand_heads, masked_attention, sink_attention
from corecontext.baselines.configs import Pattern

FIRST_COLUMNS = 30
"""Columns that are always picked, where as many are picked at all: sinks."""
NEAR_BANDS = 2
"""Diagonals that are always picked: the query's own block and the one before."""


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: Sequence[Pattern],
    *,
    block_size: int = 64,
    probe: int = 64,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """The last T of S tokens, q [B, H, T, D] on k, v [B, Hkv, S, D], one pattern for each of H
    heads: [B, H, T, D]."""
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    out = torch.empty_like(q)
    for pattern in dict.fromkeys(patterns):
        heads = [i for i, one in enumerate(patterns) if one == pattern]
        part = q[:, heads], k[:, heads], v[:, heads]
        if pattern.kind == "a_shape":
            out[:, heads] = sink_attention(
                *part,
                part[1][:, :, : pattern.first],
                part[2][:, :, : pattern.first],
                first=k.shape[2] - q.shape[2],
                window_size=pattern.second,
                scale=scale,
                softcap=softcap,
            )
        else:
            out[:, heads] = _by_blocks(*part, pattern, block_size, probe, scale, softcap)
    return out


def _by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    block_size: int,
    probe: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """One pattern of picked columns or blocks, block of queries by block of queries."""
    start, seen = k.shape[2] - q.shape[2], k.shape[2]
    if pattern.kind == "vertical_slash":
        columns, bands = pick_vertical_slash(q, k, pattern, block_size, probe, scale)
    else:
        sums = torch.zeros(
            *k.shape[:2], -(-seen // block_size), k.shape[3], dtype=torch.float32, device=k.device
        )
        index = torch.arange(seen, device=k.device) // block_size
        means = sums.index_add_(2, index, k.float()) / torch.bincount(index)[:, None]
    parts = []
    for block in range(start // block_size, -(-seen // block_size)):
        first, end = max(start, block * block_size), min(seen, (block + 1) * block_size)
        rows = q[:, :, first - start : end - start]
        if pattern.kind == "vertical_slash":
            blocks = block - bands
            in_band = (block - columns // block_size)[..., None] == bands[:, :, None]
            ok = ~in_band.any(-1)  # such a column comes with its diagonal
        else:
            blocks = pick_blocks(rows, means[:, :, : block + 1], pattern.first)
        tokens = (
            blocks[..., None] * block_size + torch.arange(block_size, device=q.device)
        ).flatten(2)
        valid = (tokens >= 0) & (tokens < seen)
        if pattern.kind == "vertical_slash":
            tokens, valid = torch.cat((columns, tokens), -1), torch.cat((ok, valid), -1)
        mask = valid[:, :, None] & (
            tokens[:, :, None] <= torch.arange(first, end, device=q.device)[:, None]
        )
        index = tokens.clamp(0, seen - 1)[..., None].expand(-1, -1, -1, k.shape[3])
        parts.append(
            masked_attention(rows, k.gather(2, index), v.gather(2, index), mask, scale, softcap)
        )
    return torch.cat(parts, 2)


def pick_vertical_slash(
    q: Tensor, k: Tensor, pattern: Pattern, block_size: int, probe: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Columns [B, h, C] and diagonals (distances in blocks) [B, h, N] with most attention of the
    last queries."""
    seen = k.shape[2]
    rows = torch.arange(max(seen - q.shape[2], seen - probe), seen, device=q.device)
    keys = torch.arange(seen, device=q.device)
    scores = (q[:, :, -len(rows) :].float() @ k.float().mT) * scale
    weights = scores.masked_fill(keys > rows[:, None], -torch.inf).softmax(-1)  # [B, h, probe, S]
    vertical = weights.sum(2)
    vertical[:, :, :FIRST_COLUMNS] = _before_all(min(FIRST_COLUMNS, seen), q.device)
    columns = vertical.topk(min(pattern.first, seen), -1).indices
    bands = (rows[:, None] // block_size - keys // block_size).clamp(min=0)
    slash = torch.zeros(*weights.shape[:2], int(bands.max()) + 1, device=q.device)
    slash.scatter_add_(2, bands.flatten().expand(*weights.shape[:2], -1), weights.flatten(2))
    slash[:, :, :NEAR_BANDS] = _before_all(min(NEAR_BANDS, slash.shape[2]), q.device)
    count = min(-(-pattern.second // block_size), slash.shape[2])
    return columns, slash.topk(count, -1).indices


def _before_all(count: int, device: torch.device) -> Tensor:
    """Scores above every sum of weights, the first one highest."""
    return 1e9 - 1e3 * torch.arange(count, device=device, dtype=torch.float32)


def pick_blocks(rows: Tensor, means: Tensor, count: int) -> Tensor:
    """Key blocks [B, h, N] for one block of queries, its own and the first always among them."""
    scores = torch.einsum("bhd,bhmd->bhm", rows.float().mean(2), means)
    scores[:, :, -1] = torch.inf
    if count > 1:
        scores[:, :, 0] = torch.inf
    return scores.topk(min(count, scores.shape[2]), -1).indices
