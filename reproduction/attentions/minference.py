"""MInference (arXiv 2407.02490): each head reads the prompt by a sparse pattern of its own.

A query at t sees a key at j <= t if

- a_shape: j is one of the first tokens, or t - j is inside the window;
- vertical_slash: j is one of the picked columns, or block(t) - block(j) is one of the picked
  diagonals; both are those with most attention of the prompt's last queries;
- block_sparse: block(j) is one of the key blocks with the largest products of mean query and mean
  key, for block(t).

Blocks are counted from the first token of the row. Work is done one block of queries at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.baselines.blocks import (
    Scoring,
    Sinks,
    expand_heads,
    masked_attention,
    sink_attention,
)
from corecontext.baselines.method import Call, Layer, Method
from corecontext.config import check_choice, check_int
from corecontext.eval.runner import fingerprint
from reproduction.attentions.dense import dense_attention, refuse_left_padding

KINDS = ("a_shape", "vertical_slash", "block_sparse")
FIRST_COLUMNS = 30
"""Columns that are always picked, where as many are picked at all: sinks."""
NEAR_BANDS = 2
"""Diagonals that are always picked: the query's own block and the one before."""


@dataclass(frozen=True)
class Pattern:
    """The keys that one head computes while it reads a prompt."""

    kind: str = "vertical_slash"
    """"a_shape", "vertical_slash" or "block_sparse"."""
    first: int = 1000
    """Sinks of an A-shape, columns of vertical-slash, key blocks of block-sparse."""
    second: int = 6096
    """Window of an A-shape, tokens on diagonals of vertical-slash; unused for block-sparse."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_int("first", self.first, 0 if self.kind == "a_shape" else 1)
        check_int("second", self.second, 0 if self.kind == "block_sparse" else 1)


@dataclass(frozen=True)
class MInference(Method):
    """Sparse reading of the prompt, a pattern for each head; later steps, and the cache, are full
    attention's."""

    name: ClassVar[str] = "minference"
    patterns: tuple[tuple[Pattern, ...], ...] | None = None
    """By layer and query head, from `search_patterns`; None is the default pattern everywhere."""
    block_size: int = 64
    """Rows that share one choice of keys; a diagonal is a band of blocks."""
    probe: int = 64
    """Last queries, from which columns and diagonals are estimated."""

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, 1)
        check_int("probe", self.probe, 1)
        if self.patterns is not None:
            object.__setattr__(self, "patterns", tuple(tuple(layer) for layer in self.patterns))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, with a short name of the patterns."""
        settings = super().to_dict()
        if self.patterns is not None:
            settings["patterns"] = fingerprint(settings["patterns"])
        return settings

    def check(self, layer: Layer) -> None:
        """Raise a ValueError unless there is a pattern for each query head of a layer."""
        if self.patterns is None:
            return
        count: object = "no such layer"
        if layer.index < len(self.patterns):
            count = len(self.patterns[layer.index])
        if count != layer.query_heads:
            raise ValueError(
                f"patterns must have one pattern for each of {layer.query_heads} heads of layer "
                f"{layer.index}, got {count}. Search them on this model."
            )

    def attend(self, call: Call) -> Tensor:
        """Read long prompts sparsely; attend to all tokens otherwise."""
        refuse_left_padding(self.name, call)
        if call.q.shape[2] < self.block_size:  # decoding, and prompts too short for a block
            return dense_attention(call.q, call.k, call.v, call.scoring)
        patterns = (Pattern(),) * call.layer.query_heads
        if self.patterns is not None:
            patterns = self.patterns[call.layer.index]
        return sparse_attention(
            call.q, call.k, call.v, patterns, call.scoring, self.block_size, self.probe
        )


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: Sequence[Pattern],
    scoring: Scoring,
    block_size: int = 64,
    probe: int = 64,
) -> Tensor:
    """Let the last T of S tokens attend under one pattern for each of H heads, [B, H, T, D] on
    [B, Hkv, S, D]."""
    tensors = (q, expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1]))
    out = torch.empty_like(q)
    for pattern in dict.fromkeys(patterns):
        heads = [head for head, wanted in enumerate(patterns) if wanted == pattern]
        q, k, v = (x[:, heads] for x in tensors)
        if pattern.kind == "a_shape":
            sinks = Sinks(k[:, :, : pattern.first], v[:, :, : pattern.first])
            start = k.shape[2] - q.shape[2]
            out[:, heads] = sink_attention(q, k, v, sinks, pattern.second, scoring, start)
        else:
            out[:, heads] = _by_blocks(q, k, v, pattern, scoring, block_size, probe)
    return out


def _by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    scoring: Scoring,
    block_size: int,
    probe: int,
) -> Tensor:
    """Attend under one pattern of picked columns or blocks, one block of queries at a time."""
    seen = k.shape[2]
    start = seen - q.shape[2]
    is_slash = pattern.kind == "vertical_slash"
    if is_slash:
        columns, bands = pick_vertical_slash(q, k, pattern, block_size, probe, scoring.scale)
    else:
        # The mean key of every block, [B, h, blocks, D]; the last block may be shorter.
        means = F.avg_pool1d(k.float().flatten(0, 1).mT, block_size, ceil_mode=True).mT
        means = means.unflatten(0, k.shape[:2])
    offsets = torch.arange(block_size, device=q.device)
    outs = []
    for block in range(start // block_size, -(-seen // block_size)):
        first = max(start, block * block_size)
        end = min(seen, (block + 1) * block_size)
        rows = q[:, :, first - start : end - start]
        # The tokens of the key blocks that this block of queries picks.
        if is_slash:
            blocks = block - bands
        else:
            blocks = pick_blocks(rows, means[:, :, : block + 1], pattern.first)
        tokens = (blocks[..., None] * block_size + offsets).flatten(2)
        valid = (tokens >= 0) & (tokens < seen)
        if is_slash:  # and the columns, but for those that a picked diagonal holds already
            in_band = (block - columns // block_size)[..., None] == bands[:, :, None]
            tokens = torch.cat((columns, tokens), -1)
            valid = torch.cat((~in_band.any(-1), valid), -1)
        positions = torch.arange(first, end, device=q.device)[:, None]
        mask = valid[:, :, None] & (tokens[:, :, None] <= positions)
        index = tokens.clamp(0, seen - 1)[..., None].expand(-1, -1, -1, k.shape[3])
        outs.append(masked_attention(rows, k.gather(2, index), v.gather(2, index), mask, scoring))
    return torch.cat(outs, 2)


def pick_vertical_slash(
    q: Tensor, k: Tensor, pattern: Pattern, block_size: int, probe: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Pick the columns and diagonals with most attention of the last queries.

    Returns:
        Columns [B, h, C]; diagonals [B, h, N] as distances in blocks.
    """
    seen = k.shape[2]
    rows = torch.arange(max(seen - q.shape[2], seen - probe), seen, device=q.device)
    keys = torch.arange(seen, device=q.device)
    scores = (q[:, :, -len(rows) :].float() @ k.float().mT) * scale
    weights = scores.masked_fill(keys > rows[:, None], -torch.inf).softmax(-1)  # [B, h, probe, S]

    vertical = weights.sum(2)
    vertical[:, :, :FIRST_COLUMNS] = _above_all(min(FIRST_COLUMNS, seen), q.device)
    columns = vertical.topk(min(pattern.first, seen), -1).indices

    bands = (rows[:, None] // block_size - keys // block_size).clamp(min=0)
    slash = torch.zeros(*weights.shape[:2], int(bands.max()) + 1, device=q.device)
    slash.scatter_add_(2, bands.flatten().expand(*weights.shape[:2], -1), weights.flatten(2))
    slash[:, :, :NEAR_BANDS] = _above_all(min(NEAR_BANDS, slash.shape[2]), q.device)
    # mutant baselines: a diagonal too few
    count = min(-(-pattern.second // block_size), slash.shape[2])
    return columns, slash.topk(count, -1).indices


def _above_all(count: int, device: torch.device) -> Tensor:
    """Return scores above every sum of weights, the first highest."""
    return 1e9 - 1e3 * torch.arange(count, device=device, dtype=torch.float32)


def pick_blocks(rows: Tensor, means: Tensor, count: int) -> Tensor:
    """Pick key blocks [B, h, N] for one block of queries, its own and the first always included."""
    scores = torch.einsum("bhd,bhmd->bhm", rows.float().mean(2), means)
    scores[:, :, -1] = torch.inf
    if count > 1:
        scores[:, :, 0] = torch.inf
    return scores.topk(min(count, scores.shape[2]), -1).indices
