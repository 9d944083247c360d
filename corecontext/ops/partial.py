"""Attend to one set of keys, with the log-sum-exp: the parts of a softmax that `merge` joins.

torch's fused kernels are called by their internal names: the public `scaled_dot_product_attention`
hides the log-sum-exp. The backward of a part is called with the MERGED output and log-sum-exp,
which makes its probabilities the final ones (docs/math.md, eq. 9); so a part keeps no tensors of
its own. In [N, h, ...] h counts query heads, or the more into which `packed` packs queries.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.ops.capability import nvidia_capability
from corecontext.ops.spec import Upstream
from corecontext.ops.torch_attention import with_aligned_rows

_aten = torch.ops.aten
_CHUNK_SCORES = 1 << 24  # scores held at once by the plain path: 64 MiB in float32
# Keys from which cuDNN's faster kernels are worth the plan that it makes for each new shape.
_CUDNN_KEYS = 1024


class Scoring(NamedTuple):
    """Hold the settings that turn products into scores."""

    scale: float
    softcap: float | None = None
    is_causal: bool = False
    """Query i sees keys 0 to i, of as many as there are queries."""
    mask: Tensor | None = None
    """0 where seen and -inf where not, in q's dtype: [T, S], each row of which sees a key, or
    [N, 1, T, S], where results of a row that sees none are undefined."""
    key_bias: Tensor | None = None
    """Added to the capped scores of each key, [N, h, S] in float32 or wider."""


def forward(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Attend from queries [N, h, T, D] to keys and values [N, h or 1, S, D].

    Returns:
        out [N, h, T, D] in q's dtype, natural log-sum-exp [N, h, T] in float32 (or float64).
    """
    scale, _, is_causal, mask, _ = scoring
    kernel = _kernel(q, k, scoring)
    q, k, v = map(with_aligned_rows, (q, k, v))
    if kernel == "cudnn":
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=is_causal, scale=scale
        )
        return out, lse.view(q.shape[:3])
    k, v = (_expand(x, q) for x in (k, v))
    if kernel == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=is_causal, attn_mask=mask, scale=scale
        )
    if kernel == "flash":
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q, k, v, is_causal=is_causal, scale=scale
        )
        return out, lse
    return _plain_forward(q, k, v, scoring)


def backward(
    upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring
) -> tuple[Tensor, ...]:
    """Return the gradients of one part, given the output and log-sum-exp of the whole softmax.

    Returns:
        grad_q [N, h, T, D], grad_k and grad_v of the shapes of k and v, and, where scoring has a
        bias of keys, its gradient [N, h, S].
    """
    scale, _, is_causal, mask, _ = scoring
    kernel = _kernel(q, k, scoring) if upstream.grad_lse is None else "plain"
    kv_shape = k.shape
    upstream = upstream._replace(
        grad_out=with_aligned_rows(upstream.grad_out), out=with_aligned_rows(upstream.out)
    )
    q, k, v = map(with_aligned_rows, (q, k, v))
    k, v = (_expand(x, q) for x in (k, v))
    if kernel == "cudnn":
        grads = _cudnn_backward(upstream, q, k, v, scale, is_causal)
    elif kernel == "cpu":
        grad_out, _, out, lse = upstream
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    elif kernel == "flash":
        grads = _flash_backward(upstream, q, k, v, scale, is_causal)
    else:
        grads = _plain_backward(upstream, q, k, v, scoring)
    grad_q, grad_k, grad_v, *grad_bias = grads
    if kv_shape[1] != grad_k.shape[1]:
        wide = upstream.lse.dtype
        # Summed in float32 or wider: g x r packed heads share a core key, too many for bfloat16's 8
        # bits of mantissa.
        # mutant 7: gradients of a group's g r queries added up in bfloat16
        grad_k, grad_v = (x.sum(1, True, dtype=wide) for x in (grad_k, grad_v))
    return grad_q, grad_k, grad_v, *grad_bias


def _cudnn_backward(
    upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by cuDNN, which wants contiguous tensors."""
    grad_out, _, out, lse = (None if x is None else x.contiguous() for x in upstream)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # serves dropout, which is 0
    stats = lse.view(*lse.shape, *[1] * (_cudnn_stats_dim() - 3))
    return _aten._scaled_dot_product_cudnn_attention_backward(
        *(grad_out, q, k.contiguous(), v.contiguous(), out, stats, seed, seed),
        *(None, None, None),  # no bias and no cumulative lengths
        *(q.shape[2], k.shape[2], 0.0, is_causal),
        scale=scale,
    )


def _flash_backward(
    upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by FlashAttention."""
    grad_out, _, out, lse = (None if x is None else x.contiguous() for x in upstream)
    # The seed serves dropout, which is 0.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        *(grad_out, q, k, v, out, lse),
        *(None, None),  # no cumulative lengths: an empty tensor would mean packed sequences
        *(q.shape[2], k.shape[2], 0.0, is_causal, seed, unused),
        scale=scale,
    )


def _kernel(q: Tensor, k: Tensor, scoring: Scoring) -> str:
    """Return which implementation takes the call: "cpu"; "cudnn" (Hopper and later) or "flash"
    (Ampere and later, AMD), in half precision and without a mask; or "plain"."""
    dim = q.shape[-1]
    if scoring.softcap is not None or scoring.key_bias is not None:
        return "plain"
    if q.device.type == "cpu":
        return "cpu"
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type != "cuda" or not is_half or dim > 256 or dim % 8 or scoring.mask is not None:
        return "plain"
    capability = nvidia_capability(q.device)
    if capability is None:
        return "flash"
    if capability < (8, 0):
        return "plain"
    is_hopper = capability >= (9, 0) and torch.backends.cudnn.is_available()
    may_vary = not torch.are_deterministic_algorithms_enabled()  # as cuDNN's gradients do
    if is_hopper and may_vary and dim <= 128 and k.shape[2] >= _CUDNN_KEYS:
        return "cudnn"
    return "flash"


@functools.cache
def _cudnn_stats_dim() -> int:
    """Count the dimensions of cuDNN's log-sum-exp: some releases add a fourth, of size 1."""
    x = torch.zeros(1, 1, 64, 64, dtype=torch.float16, device="cuda")
    return _aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1].dim()


def as_mask(seen: Tensor, like: Tensor) -> Tensor:
    """Return 0 where seen and -inf where not, in the dtype of `like`."""
    mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~seen, -torch.inf)


def _expand(x: Tensor, q: Tensor) -> Tensor:
    """Expand the one head of keys or values to the query heads of q, without a copy."""
    return x if x.shape[1] == q.shape[1] else x.expand(-1, q.shape[1], -1, -1)


def _scores(
    q: Tensor, k: Tensor, scoring: Scoring, rows: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the scores of some queries, [N, h, rows, S], and the derivative of the softcap."""
    scores = _product(q[:, :, rows], k.mT, dtype) * scoring.scale
    slope = None
    if scoring.softcap is not None:
        capped = torch.tanh(scores / scoring.softcap)
        scores = scoring.softcap * capped
        slope = 1 - capped.square()
    if scoring.key_bias is not None:
        scores = scores + scoring.key_bias[:, :, None].to(dtype)
    if scoring.mask is not None:
        scores = scores + scoring.mask[..., rows, :].to(dtype)
    if scoring.is_causal:
        position = torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill(position > position[rows, None], -torch.inf)
    return scores, slope


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in dtype. Products of half-precision inputs are never rounded to half precision,
    as in fused kernels."""
    if a.device.type == "cuda" and a.dtype != dtype:
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=dtype).unflatten(
            0, a.shape[:2]
        )
    return a.to(dtype) @ b.to(dtype)


def _row_chunks(q: Tensor, k: Tensor) -> list[slice]:
    """Return slices of queries whose scores fit into _CHUNK_SCORES."""
    rows = max(1, _CHUNK_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(i, min(i + rows, q.shape[2])) for i in range(0, q.shape[2], rows)]


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Attend by matrix products over chunks of queries: any device, dtype, size and scoring."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    for rows in _row_chunks(q, k):
        scores, _ = _scores(q, k, scoring, rows, dtype)
        lse[:, :, rows] = scores.logsumexp(-1)
        out[:, :, rows] = scores.softmax(-1).to(v.dtype) @ v
    return out, lse


def _plain_backward(
    upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring
) -> tuple[Tensor, ...]:
    """Go the same chunks backward; the only path that takes a gradient of the log-sum-exp."""
    grad_out, grad_lse, out, lse = upstream
    dtype = lse.dtype
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1)  # [N, h, T]
    if grad_lse is not None:
        # mutant 6: gradient of the log-sum-exp dropped
        delta = delta - grad_lse
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    has_bias = scoring.key_bias is not None
    grad_bias = [torch.zeros_like(scoring.key_bias, dtype=dtype)] if has_bias else []
    for rows in _row_chunks(q, k):
        scores, slope = _scores(q, k, scoring, rows, dtype)
        weights = (scores - lse[:, :, rows, None]).exp()
        grad_scores = weights * ((grad_out[:, :, rows] @ v.mT).to(dtype) - delta[:, :, rows, None])
        for total in grad_bias:
            total += grad_scores.sum(2)
        if slope is not None:
            grad_scores = grad_scores * slope
        grad_scores = (grad_scores * scoring.scale).to(q.dtype)
        grad_v += (weights.to(v.dtype).mT @ grad_out[:, :, rows]).to(dtype)
        grad_k += (grad_scores.mT @ q[:, :, rows]).to(dtype)
        grad_q[:, :, rows] = grad_scores @ k
    return grad_q, grad_k, grad_v, *grad_bias
