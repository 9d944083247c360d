"""The specification: docs/math.md written out densely, differentiable, in float32 or float64.

Memory grows with T x (M + S): this file is to be read and to be compared with, not to be run on
long inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corecontext.ops.rotary import Rotary
from corecontext.visibility import visible_cores_of


def unsupported_reason(q: Tensor) -> str | None:
    """Why this backend cannot take the call, or None; the reference takes every valid call."""
    return None


def _wide(x: Tensor) -> Tensor:
    """Low-precision inputs are computed in float32."""
    return x if x.dtype == torch.float64 else x.float()


def _softcap(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def pool(
    q_last: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    pooling: str = "cca",
    core_heads: str = "kv",
    rotary: Rotary | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Pool groups into core tokens (docs/math.md, eq. 1 to 3).

    Args:
        q_last: The query of each group's last token, [N, r, M, D], rotary applied.
        k, v: Keys (rotary applied) and values by group, [N, M, g, D].
        scale: Factor of the scores.
        pooling, core_heads, softcap: As in `cca_attention`.
        rotary: The keys' rotation, for middle-position core keys; None pools the keys as they are.

    Returns:
        core_k, core_v, each [N, 1 or r, M, D], in float32 (float64 if given).
    """
    q_last, k, v = _wide(q_last), _wide(k), _wide(v)
    group_size = k.shape[2]
    scores = _softcap(torch.einsum("nrmd,nmgd->nrmg", q_last, k) * scale, softcap)
    if rotary is not None:
        # planted: oracle: middle one token early
        k = rotary.turn(k, group_size // 2 - torch.arange(group_size, device=k.device))
    num_heads = q_last.shape[1] if core_heads == "query" else 1
    if pooling == "max":
        return (
            k.amax(2)[:, None].expand(-1, num_heads, -1, -1),
            v.amax(2)[:, None].expand(-1, num_heads, -1, -1),
        )
    if pooling == "mean":
        weights = torch.full_like(scores[:, :num_heads], 1 / group_size)
    else:
        weights = scores.softmax(-1)  # [N, r, M, g]
        if core_heads == "kv":
            weights = weights.mean(1, keepdim=True)
    return torch.einsum("nrmg,nmgd->nrmd", weights, k), torch.einsum("nrmg,nmgd->nrmd", weights, v)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core_k: Tensor,
    core_v: Tensor,
    *,
    q_start: int = 0,
    k_start: int = 0,
    group_size: int,
    window_size: int,
    scale: float,
    softcap: float | None = None,
    core_bias: Tensor | None = None,
    sinks: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend to core tokens of the far past and raw tokens of the near past in one softmax
    (docs/math.md, eq. 5).

    Args:
        q: Queries of positions q_start .. q_start + T - 1, [N, r, T, D].
        k, v: Raw keys and values of positions k_start .. k_start + S - 1, [N, S, D], S reaching the
            last query.
        core_k, core_v: Core tokens of the groups n / g .. n / g + M - 1, [N, 1 or r, M, D].
        core_bias: Added to the scores of core tokens, [N, r]; None for nothing.
        sinks: First tokens kept raw (n, docs/math.md, eq. 13), a multiple of group_size.

    Returns:
        out [N, r, T, D] and log-sum-exp [N, r, T], both float32 (float64 if given).
    """
    q, k, v, core_k, core_v = map(_wide, (q, k, v, core_k, core_v))
    heads = q.shape[1]
    core_scores = _softcap(q @ core_k.expand(-1, heads, -1, -1).mT * scale, softcap)  # [N, r, T, M]
    if core_bias is not None:
        core_scores = core_scores + core_bias.to(q.dtype)[:, :, None, None]
    local_scores = _softcap(q @ k[:, None].mT * scale, softcap)  # [N, r, T, S]
    see_core, see_local = visible(
        q.shape[2],
        k.shape[1],
        core_k.shape[2],
        q_start,
        k_start,
        group_size,
        window_size,
        q.device,
        sinks,
    )
    scores = torch.cat(
        (
            core_scores.masked_fill(~see_core, -torch.inf),
            local_scores.masked_fill(~see_local, -torch.inf),
        ),
        -1,
    )
    weights_core, weights_local = scores.softmax(-1).split([core_k.shape[2], k.shape[1]], -1)
    out = _sum_seen(weights_core, see_core, core_v.expand(-1, heads, -1, -1)) + _sum_seen(
        weights_local, see_local, v[:, None].expand(-1, heads, -1, -1)
    )
    return out, scores.logsumexp(-1)


def _sum_seen(weights: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """weights @ values in which a NaN value reaches only the rows that see it (0 x NaN would reach
    all)."""
    nan = values.isnan()
    total = weights @ values.masked_fill(nan, 0)
    if not bool(nan.any()):
        return total
    return total.masked_fill(seen.to(values.dtype) @ nan.to(values.dtype) > 0, torch.nan)


def visible(
    num_queries: int,
    num_keys: int,
    num_cores: int,
    q_start: int,
    k_start: int,
    group_size: int,
    window_size: int,
    device: torch.device,
    sinks: int = 0,
) -> tuple[Tensor, Tensor]:
    """Masks of what each query sees: core tokens [T, M] and raw tokens [T, S], True where seen."""
    position = torch.arange(q_start, q_start + num_queries, device=device)[:, None]
    key_position = torch.arange(k_start, k_start + num_keys, device=device)
    cores = visible_cores_of(position, group_size, window_size)  # [T, 1]
    # planted: sinks: counted twice, reference
    see_core = torch.arange(num_cores, device=device) + sinks // group_size < cores
    # planted: 2: a token not covered, reference
    # planted: 3: the next token is seen, reference
    see_local = ((key_position >= cores * group_size) | (key_position < sinks)) & (
        key_position <= position
    )
    return see_core, see_local
