"""A few query rows of a long call against float64: what they see, gathered, whatever the length."""

from __future__ import annotations

import torch
from torch import Tensor

from corecontext.bench.operator import rotary_of
from corecontext.ops import reference
from corecontext.visibility import num_visible_cores


def check_rows(q: Tensor, k: Tensor, v: Tensor, out: Tensor, group_size: int, window_size: int) -> float:
    """Compare the first, middle and last rows of some heads, and those where core tokens begin to be seen.

    Args:
        q, out: [B, H, L, D]. k, v: [B, Hkv, L, D].

    Returns:
        The largest error over the norm of its row.

    Raises:
        AssertionError: a row is off by more than a few roundings of its dtype.
    """
    length, heads = q.shape[2], q.shape[1]
    first = window_size + group_size - 1
    rows = sorted({row for row in (0, 1, first - 1, first, first + group_size, length // 2, length - 1)
                   if 0 <= row < length})
    worst = 0.0
    for head in sorted({0, heads // 2, heads - 1}):
        truth = exact_rows(q, k, v, head, rows, group_size, window_size)
        error = (out[-1, head, rows].double() - truth).norm(dim=-1) / truth.norm(dim=-1)
        worst = max(worst, float(error.max()))
        bound = 8 * torch.finfo(q.dtype).eps
        if not bool((error <= bound).all()):
            row = rows[int(error.argmax())]
            raise AssertionError(f"CCA is wrong on this machine: head {head}, query {row} of {length} is off by "
                                 f"{float(error.max()):.2e}")
    return worst


def exact_rows(q: Tensor, k: Tensor, v: Tensor, head: int, rows: list[int], group_size: int,
               window_size: int) -> Tensor:
    """Those rows of one head of the last sequence in float64, [rows, D]; only what they see is computed."""
    dim, repeats = q.shape[3], q.shape[1] // k.shape[1]
    kv_head = head // repeats
    key, value = k[-1, kv_head], v[-1, kv_head]
    count = num_visible_cores(max(rows), group_size, window_size)
    ends = slice(group_size - 1, count * group_size, group_size)
    shared = q[-1, kv_head * repeats:(kv_head + 1) * repeats, ends].double()[None]
    grouped = (x[:count * group_size].unflatten(0, (count, group_size)).double()[None] for x in (key, value))
    core_k, core_v = (x[0, 0] for x in reference.pool(shared, *grouped, scale=dim ** -0.5, pooling="cca",
                                                      core_heads="kv", rotary=rotary_of(q)))
    result = []
    for row in rows:
        cores = num_visible_cores(row, group_size, window_size)
        keys = torch.cat((core_k[:cores], key[cores * group_size:row + 1].double()))
        values = torch.cat((core_v[:cores], value[cores * group_size:row + 1].double()))
        result.append((keys @ q[-1, head, row].double() * dim ** -0.5).softmax(0) @ values)
    return torch.stack(result)
