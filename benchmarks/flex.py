"""Compute CCA with PyTorch's FlexAttention: [core tokens; tokens] under a block mask."""

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
    """Compute CCA with the default settings, pooling included.

    Args:
        compiled: False runs FlexAttention's dense definition instead.
    """
    rotary = Rotary.from_theta(rotary_theta, q.shape[-1], q.device)
    length = q.shape[2]
    cores = core_slots(length, group_size)
    # Pooling alone is differentiable by the packed backend.
    backend = "packed" if torch.is_grad_enabled() and q.requires_grad else "auto"
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
    """Compile for one shape: shapes do not count against each other's recompilation limit."""
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


def core_slots(length: int, group_size: int) -> int:
    """Return the core tokens rounded up to whole blocks, so that tokens begin at a block."""
    return -(-(length // group_size) // BLOCK) * BLOCK


@functools.lru_cache(maxsize=2)
def cca_block_mask(
    length: int, group_size: int, window_size: int, device: torch.device
) -> BlockMask:
    """Return the blocks of [core tokens; tokens] that each block of queries sees, partly or fully.

    They follow from the visibility rules, without a dense mask.
    """
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
    visible_blocks = torch.cat(
        (core < most, (token_end >= fewest * group_size) & (token <= last)), 1
    )
    whole = torch.cat(
        (core + BLOCK <= fewest, (token >= most * group_size) & (token_end <= first)), 1
    )
    whole[:, -1] &= length % BLOCK == 0  # the last block may hang over the end
    return BlockMask.from_kv_blocks(
        *_listed(visible_blocks & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, slots + length),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of set blocks in each row, [1, 1, rows], and the columns, the set ones
    first, [1, 1, rows, columns]."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None].contiguous()
