"""Check single rows of a long result, each at the cost of one pass over the tokens before it."""

import torch
from torch import Tensor

from corecontext.ops import reference
from corecontext.ops.spec import Cores, Groups, Spec, Tokens
from corecontext.visibility import local_start, num_visible_cores

TOLERANCE = 8  # times the spacing of the dtype's numbers at the sum of the terms' sizes


def sample_rows(length: int, group_size: int, window_size: int) -> list[int]:
    """Return the first row, the first to see a core token, the middle, and the last two."""
    rows = (
        0,
        window_size + group_size - 1,
        window_size + group_size,
        length // 2,
        length - 2,
        length - 1,
    )
    return sorted({row for row in rows if 0 <= row < length})


def true_rows(q: Tensor, k: Tensor, v: Tensor, rows: list[int], kv_head: int, spec: Spec) -> Tensor:
    """Return CCA's rows of the first sequence for the query heads of one KV head, in float64.

    Args:
        q, k, v: [B, H, L, D] and [B, Hkv, L, D].

    Returns:
        [rows, r, D]
    """
    g = spec.group_size
    assert isinstance(g, int)
    repeats = q.shape[1] // k.shape[1]
    heads = slice(kv_head * repeats, (kv_head + 1) * repeats)
    groups = num_visible_cores(rows[-1], g, spec.window_size)
    past = slice(0, groups * g)
    group_k, group_v = (
        x[0, kv_head, past].double().unflatten(0, (groups, g))[None] for x in (k, v)
    )
    q_last = q[:1, heads, g - 1 : groups * g : g].double()
    core_k, core_v = reference.pool(Groups(q_last, group_k, group_v), spec)
    outputs = []
    for row in rows:
        start = local_start(row, g, spec.window_size)
        cores = num_visible_cores(row, g, spec.window_size)
        near_k, near_v = (x[0, kv_head, None, start : row + 1].double() for x in (k, v))
        query = q[:1, heads, row : row + 1].double()
        out, _ = reference.attend(
            Tokens(query, near_k, near_v, row, start),
            Cores(core_k[:, :, :cores], core_v[:, :, :cores]),
            spec,
        )
        outputs.append(out[0, :, 0])
    return torch.stack(outputs)


def check_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> None:
    """Raise AssertionError unless sampled rows of CCA's output [B, H, L, D] are right, of the first
    and last KV head."""
    assert isinstance(spec.group_size, int)
    rows = sample_rows(q.shape[2], spec.group_size, spec.window_size)
    repeats = q.shape[1] // k.shape[1]
    for kv_head in sorted({0, k.shape[1] - 1}):
        truth = true_rows(q, k, v, rows, kv_head, spec)
        ours = out[0, kv_head * repeats : (kv_head + 1) * repeats, rows].double().transpose(0, 1)
        error = (ours - truth).abs().amax(-1)  # [rows, r]
        # Roundings are of the terms of the sum, which may cancel.
        terms = true_rows(q, k, v.abs(), rows, kv_head, spec).amax(-1)
        bound = TOLERANCE * torch.finfo(q.dtype).eps * terms
        if not bool((error <= bound).all()):  # also where it is NaN
            worst = int((error / bound).nan_to_num(torch.inf).amax(1).argmax())
            raise AssertionError(
                f"CCA is wrong at length {q.shape[2]}, nothing was timed: query {rows[worst]} is "
                f"off by {float(error[worst].max()):.2e}, allowed is "
                f"{float(bound[worst].min()):.2e}"
            )
