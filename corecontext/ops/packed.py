"""Attention in plain torch with linear memory: fused kernels on the packed core part and on blocks
of the local part.

From position A = s + g - 1 on, g neighbouring queries see the same core tokens, and each next g see
one more. Packed g at a time into extra heads, they see the core tokens under a plain causal mask
(docs/math.md, eq. 6), which any attention kernel computes well. The local part goes block by block
under one shared mask. Parts meet in `merge`.
"""

from __future__ import annotations

import functools
import sys
from typing import NamedTuple

import torch
from torch import Tensor

# planted: arrows: a backend imports another
from corecontext.ops import compose, partial, pooling, sinks
from corecontext.ops.merge import merge
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream
from corecontext.visibility import (
    first_core_query,
    local_start,
    num_visible_cores,
    visible_cores_of,
)

pool = pooling.forward
pool_backward = pooling.backward

_BLOCK_QUERIES = {"cpu": 128}  # local block; elsewhere launches cost more than masked work
_BLOCK_QUERIES_DEFAULT = 512
_MERGE_ELEMENTS = 1 << 19  # elements merged at once, so that their wide temporaries stay in cache
_CORE_ELEMENTS = (
    1 << 22
)  # elements of q packed at once: the copies that packing makes are a few times this


def unsupported_reason(q: Tensor) -> str | None:
    """Why this backend cannot take the call, or None."""
    if q.device.type in ("cpu", "cuda", "mps", "xpu"):
        return None
    return f"device {q.device.type!r} is not one of cpu, cuda, mps, xpu"


class _Plan(NamedTuple):
    """How queries q_start .. q_end-1 are cut: local blocks, and where whole packs begin."""

    blocks: list[tuple[int, int]]
    core_start: int  # first query that sees a core token
    pack_start: int  # first query that begins a pack of g equal views
    q_end: int


def _plan(q_start: int, q_end: int, group_size: int, window_size: int, device: str) -> _Plan:
    """Cut at A, then at the first whole pack, then every block of whole packs."""
    first = first_core_query(group_size, window_size)
    core_start = min(max(q_start, first), q_end)
    pack_start = min(core_start + (first - core_start) % group_size, q_end)
    size = _BLOCK_QUERIES.get(device, _BLOCK_QUERIES_DEFAULT)
    size = group_size * max(1, size // group_size)
    early = (
        [(0, core_start)]
        if q_start == 0
        else [(a, min(a + size, core_start)) for a in range(q_start, core_start, size)]
    )
    head = [(core_start, pack_start)] if core_start < pack_start else []
    blocks = [(a, min(a + size, q_end)) for a in range(pack_start, q_end, size)]
    return _Plan(early + head + blocks, core_start, pack_start, q_end)


@functools.lru_cache(maxsize=8)
def _interior_bias(
    rows: int, group_size: int, window_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The mask shared by all blocks that begin a pack."""
    first = first_core_query(group_size, window_size)
    like = torch.empty((), dtype=dtype, device=device)
    return _bias(first, first + rows, group_size, window_size, like)


def _bias(start: int, end: int, group_size: int, window_size: int, like: Tensor) -> Tensor:
    """Additive mask of queries start .. end-1 over the raw keys that any of them sees."""
    position = torch.arange(start, end, device=like.device)[:, None]
    key = torch.arange(local_start(start, group_size, window_size), end, device=like.device)
    # planted: 2: a token covered twice, packed
    # planted: 3: the next token is seen, packed
    seen = (key >= visible_cores_of(position, group_size, window_size) * group_size) & (
        key <= position
    )
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(
        ~seen, -torch.inf
    )


class _Call:
    """One sequence-level call: its tensors, its plan and the parts of its softmax."""

    def __init__(self, tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None) -> None:
        self.tokens, self.cores, self.spec, self.core_bias = tokens, cores, spec, core_bias
        self.q, self.k, self.v = tokens.q, tokens.k[:, None], tokens.v[:, None]
        self.q_start = tokens.q_start
        self.options = {"scale": spec.scale, "softcap": spec.softcap}
        q_end = tokens.q_start + tokens.q.shape[2]
        self.plan = _plan(
            tokens.q_start, q_end, spec.group_size, spec.window_size, tokens.q.device.type
        )

    def local_blocks(self):
        """Each block of queries: its rows in q, its keys in k, and its mask."""
        g, s = self.spec.group_size, self.spec.window_size
        for start, end in self.plan.blocks:
            if start == end:
                continue
            low = local_start(start, g, s)
            rows = slice(start - self.q_start, end - self.q_start)
            keys = slice(low - self.tokens.k_start, end - self.tokens.k_start)
            if start == 0:
                mask = {"is_causal": True}
            elif start >= self.plan.pack_start:
                mask = {"bias": _interior_bias(end - start, g, s, self.q.dtype, self.q.device)}
            else:
                mask = {"bias": _bias(start, end, g, s, self.q)}
            yield rows, keys, mask

    def heads(self):
        """The same call for a few sequences and KV heads at a time, each with where they lie in
        N."""
        size = max(1, _CORE_ELEMENTS // max(1, self.q[0].numel()))
        for low in range(0, self.q.shape[0], size):
            rows = slice(low, low + size)
            tokens = self.tokens._replace(
                q=self.q[rows], k=self.tokens.k[rows], v=self.tokens.v[rows]
            )
            cores = Cores(self.cores.k[rows], self.cores.v[rows])
            bias = None if self.core_bias is None else self.core_bias[rows]
            yield rows, _Call(tokens, cores, self.spec, bias)

    def core_parts(self):
        """Each part of the core attention: its rows in q, its core tokens, and whether it is
        packed."""
        g, s = self.spec.group_size, self.spec.window_size
        core_start, pack_start, q_end = self.plan.core_start, self.plan.pack_start, self.plan.q_end
        if core_start < pack_start:
            yield (
                slice(core_start - self.q_start, pack_start - self.q_start),
                slice(0, num_visible_cores(core_start, g, s)),
                False,
            )
        if pack_start < q_end:
            rows = slice(pack_start - self.q_start, q_end - self.q_start)
            seen = num_visible_cores(
                pack_start, g, s
            )  # the first pack's last core token lies on the diagonal
            if seen > 1:
                yield rows, slice(0, seen - 1), False
            # planted: 3: a group is seen before it is complete
            yield rows, slice(seen - 1, seen - 1 + -(-(q_end - pack_start) // g)), True

    def pack(self, x: Tensor) -> Tensor:
        """[N, r, T, ...] to [N Hc, r / Hc g, P, ...], the last pack filled with zeros."""
        n, r, t = x.shape[:3]
        g, heads = self.spec.group_size, self.cores.k.shape[1]
        packs = -(-t // g)
        if packs * g != t:
            x = torch.cat((x, x.new_zeros(n, r, packs * g - t, *x.shape[3:])), 2)
        return (
            x.unflatten(2, (packs, g))
            .transpose(2, 3)
            .reshape(n * heads, r // heads * g, packs, *x.shape[3:])
        )

    def unpack(self, x: Tensor, t: int) -> Tensor:
        """The inverse of `pack`, without the filling; a copy."""
        n, r, g = self.q.shape[0], self.q.shape[1], self.spec.group_size
        x = x.reshape(n, r, g, *x.shape[2:]).transpose(2, 3)  # [N, r, P, g, ...]
        return x.flatten(2, 3)[:, :, :t]

    def by_core_head(self, x: Tensor) -> Tensor:
        """[N, r, T, ...] to [N Hc, r / Hc, T, ...]: each core head's own queries."""
        heads = self.cores.k.shape[1]
        return x.reshape(x.shape[0] * heads, x.shape[1] // heads, *x.shape[2:])

    def core_kv(self, cores: slice) -> tuple[Tensor, Tensor]:
        """Core keys and values [N Hc, 1, m, D]."""
        core_k, core_v = (x[:, :, cores].flatten(0, 1)[:, None] for x in self.cores)
        return core_k, core_v

    def core_forward(self, rows: slice, cores: slice, packed: bool) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of one core part, in the layout of q[:, :, rows]; the bias is in
        the latter."""
        q = self.q[:, :, rows]
        core_k, core_v = self.core_kv(cores)
        arranged = self.pack(q) if packed else self.by_core_head(q)
        # planted: 7: softmax scale 0.2 % off in the core part
        out, lse = partial.forward(arranged, core_k, core_v, is_causal=packed, **self.options)
        out, lse = (
            self.unpack(x, q.shape[2]) if packed else x.reshape(q.shape[: x.dim()])
            for x in (out, lse)
        )
        return out, lse if self.core_bias is None else lse + self.core_bias.to(lse.dtype)[
            :, :, None
        ]

    def merge_core(self, out: Tensor, lse: Tensor) -> None:
        """Merge the core parts into the local part's out [N, r, T, D] and log-sum-exp [N, r, T], in
        place."""
        parts: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for rows, cores, packed in self.core_parts():
            parts.setdefault((rows.start, rows.stop), []).append(
                self.core_forward(rows, cores, packed)
            )
        step = max(1, _MERGE_ELEMENTS // (out.shape[0] * out.shape[1] * out.shape[3]))
        for (start, stop), results in parts.items():
            for low in range(start, stop, step):
                rows, inner = (
                    slice(low, min(low + step, stop)),
                    slice(low - start, min(low + step, stop) - start),
                )
                out[:, :, rows], lse[:, :, rows] = merge(
                    [out[:, :, rows], *(part[:, :, inner] for part, _ in results)],
                    [lse[:, :, rows], *(part[:, :, inner] for _, part in results)],
                )

    def core_backward(self, upstream: Upstream, grad_q: Tensor, grad_cores: Cores) -> None:
        """Add the core parts' gradients to grad_q [N, r, T, D] and grad_cores, in place."""
        lse = upstream.lse
        # A bias on all core scores only shifts the core part's log-sum-exp, here and in
        # core_forward.
        # planted: 6: core bias forgotten in the backward
        lse = lse if self.core_bias is None else lse - self.core_bias.to(lse.dtype)[:, :, None]
        upstream = upstream._replace(lse=lse)
        for rows, cores, packed in self.core_parts():
            arrange = self.pack if packed else self.by_core_head
            results = upstream.rows(rows)
            dq, dk, dv = partial.backward(
                Upstream(*(None if x is None else arrange(x) for x in results)),
                arrange(self.q[:, :, rows]),
                *self.core_kv(cores),
                is_causal=packed,
                **self.options,
            )
            part = grad_q[:, :, rows]
            part += self.unpack(dq, part.shape[2]) if packed else dq.reshape(part.shape)
            for total, grad in zip(grad_cores, (dk, dv)):
                total[:, :, cores] += grad.reshape(total[:, :, cores].shape)


def attend(
    tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.attend`, without autograd and with linear memory; out in the dtype of q."""
    if spec.sinks:
        return sinks.attend(attend, tokens, cores, spec, core_bias)
    q = tokens.q
    call = _Call(tokens, cores, spec, core_bias)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.empty(q.shape[:-1], dtype=lse_dtype, device=q.device)
    for rows, keys, mask in call.local_blocks():
        out[:, :, rows], lse[:, :, rows] = partial.forward(
            q[:, :, rows], call.k[:, :, keys], call.v[:, :, keys], **mask, **call.options
        )
    for rows, part in call.heads():
        part.merge_core(out[rows], lse[rows])
    return out, lse


def attend_backward(
    upstream: Upstream, tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v, core_k, core_v and core_bias of a whole sequence
    (docs/math.md, eq. 9).

    Each part's backward is called with the merged out and lse. Sums over blocks are kept in
    float32.
    """
    if spec.sinks:
        return sinks.attend_backward(attend_backward, upstream, tokens, cores, spec, core_bias)
    call = _Call(tokens, cores, spec, core_bias)
    grad_q, grad_k, grad_v, *grad_cores = (
        torch.zeros(x.shape, dtype=upstream.lse.dtype, device=x.device)
        for x in (call.q, call.k, call.v, *cores)
    )
    for rows, keys, mask in call.local_blocks():
        dq, dk, dv = partial.backward(
            upstream.rows(rows),
            call.q[:, :, rows],
            call.k[:, :, keys],
            call.v[:, :, keys],
            **mask,
            **call.options,
        )
        grad_q[:, :, rows] += dq
        grad_k[:, :, keys] += dk
        grad_v[:, :, keys] += dv
    for rows, part in call.heads():
        part.core_backward(
            Upstream(*(None if x is None else x[rows] for x in upstream)),
            grad_q[rows],
            Cores(*(x[rows] for x in grad_cores)),
        )
    grad_bias = None if core_bias is None else _bias_gradient(call, upstream)
    return grad_q, grad_k[:, 0], grad_v[:, 0], *grad_cores, grad_bias


def _bias_gradient(call: _Call, upstream: Upstream) -> Tensor:
    """Gradient of the core bias [N, r]: the sum of the core scores' gradients, from each part's own
    output."""
    lse = upstream.lse
    grad = torch.zeros(call.q.shape[:2], dtype=lse.dtype, device=lse.device)
    for rows, cores, packed in call.core_parts():
        part_out, part_lse = call.core_forward(rows, cores, packed)
        results = upstream.rows(rows)
        difference = part_out.to(lse.dtype) - results.out.to(lse.dtype)
        change = (difference * results.grad_out.to(lse.dtype)).sum(-1)
        if results.grad_lse is not None:
            change = change + results.grad_lse
        grad += ((part_lse - results.lse).exp() * change).sum(-1)
    return grad


def gradients(
    upstream: Upstream,
    tokens: Tokens,
    groups: Groups,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `compose.gradients`."""
    this = sys.modules[__name__]
    return compose.gradients(this, upstream, tokens, groups, cores, spec, core_bias)
