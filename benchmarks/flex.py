"""CCA by PyTorch's FlexAttention: the same result from [core tokens; tokens] under a block mask,
pooling included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from corecontext.ops.api import pool_core_tokens
from corecontext.ops.rotary import Rotary
from corecontext.visibility import visible_cores_of

BLOCK = 128  # FlexAttention's default


def flex_cca(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group_size: int,
    window_size: int,
    *,
    rotary_theta: float,
    compiled: bool = True,
) -> Tensor:
    """CCA with the default settings; `compiled=False` runs FlexAttention's dense definition
    instead."""
    rotary = Rotary.from_theta(rotary_theta, q.shape[-1], q.device)
    length, cores = q.shape[2], core_slots(q.shape[2], group_size)
    backend = (
        "packed" if torch.is_grad_enabled() and q.requires_grad else "auto"
    )  # differentiable by itself
    pooled = pool_core_tokens(q, k, v, group_size=group_size, rotary=rotary, backend=backend)
    keys, values = (
        torch.cat((F.pad(core, (0, 0, 0, cores - core.shape[2])), x), 2)
        for core, x in zip(pooled, (k, v))
    )
    mask = cca_block_mask(length, group_size, window_size, q.device)
    attend: Any = _compiled(length, q.shape[1], k.shape[1]) if compiled else flex_attention
    return attend(q, keys, values, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def _compiled(*sizes: int) -> Callable[..., Tensor]:
    """A compiled function for each shape, so that none counts against another's limit of
    compilations."""
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


def core_slots(length: int, group_size: int) -> int:
    """Core tokens, filled up to whole blocks so that tokens begin at a block of their own."""
    return -(-(length // group_size) // BLOCK) * BLOCK


@functools.lru_cache(maxsize=2)
def cca_block_mask(
    length: int, group_size: int, window_size: int, device: torch.device
) -> BlockMask:
    """Which blocks of [core tokens; tokens] each block of queries sees, in part or whole, straight
    from the rules."""
    slots = core_slots(length, group_size)

    def visible(batch: Tensor, head: Tensor, query: Tensor, entry: Tensor) -> Tensor:
        cores = visible_cores_of(query, group_size, window_size)
        token = entry - slots
        return torch.where(
            entry < slots, entry < cores, (token >= cores * group_size) & (token <= query)
        )

    def starts(count: int) -> Tensor:
        return torch.arange(0, count, BLOCK, device=device)

    first = starts(length)[:, None]  # first and last query of each block
    last = (first + BLOCK - 1).clamp(max=length - 1)
    fewest, most = (visible_cores_of(x, group_size, window_size) for x in (first, last))
    core, token = starts(slots)[None], starts(length)[None]
    token_end = (token + BLOCK - 1).clamp(max=length - 1)
    seen = torch.cat((core < most, (token_end >= fewest * group_size) & (token <= last)), 1)
    whole = torch.cat(
        (core + BLOCK <= fewest, (token >= most * group_size) & (token_end <= first)), 1
    )
    whole[:, -1] &= length % BLOCK == 0  # the last block may hang over the end
    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, slots + length),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are set, and which, those first: [1, 1, rows] and [1, 1, rows,
    columns]."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None].contiguous()
