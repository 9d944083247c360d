"""Attend in plain torch with linear memory: PyTorch's fused kernels on the packed core part and on
blocks of the local part.

From position A = s + g - 1 on, g neighbouring queries, a pack, see the same core tokens, and each
next pack sees one more. With each query of a pack in a head of its own, packs are positions that
see the core tokens under a plain causal mask (docs/math.md, eq. 6), which any attention kernel
computes well. With g = 2, queries A and A + 1 are position 0 of two heads and see core token 0;
A + 2 and A + 3 are position 1 and see 0 and 1. The local part, raw tokens, goes block by block
under one shared mask. `merge` joins the parts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# mutant arrows: a backend imports another
from corecontext.ops import compose, partial, pooling, sinks
from corecontext.ops.merge import merge_into
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream
from corecontext.visibility import (
    first_core_query,
    local_start,
    num_visible_cores,
    sees_token,
)

pool = pooling.forward
pool_with_mass = pooling.forward_with_mass
pool_backward = pooling.backward

# Queries of a local block; off the CPU launches cost more than masked work.
_BLOCK_QUERIES = {"cpu": 128}
_BLOCK_QUERIES_DEFAULT = 512
# Elements of q packed at once: the copies that packing makes are a few times this.
_CORE_ELEMENTS = 1 << 22


def unsupported_reason(q: Tensor) -> str | None:
    """Return why this backend cannot take the call, or None."""
    if q.device.type in ("cpu", "cuda", "mps", "xpu"):
        return None
    return f"device {q.device.type!r} is not one of cpu, cuda, mps, xpu"


def attend(
    tokens: Tokens, cores: Cores, spec: Spec, mass: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend as `reference.attend`, without autograd and with linear memory; out in the dtype of
    q."""
    if spec.sinks:
        return sinks.attend(attend, tokens, cores, spec, mass)
    q = tokens.q
    call = _Call(tokens, cores, spec, mass)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
    for rows, keys, scoring in call.local_blocks():
        out[:, :, rows], lse[:, :, rows] = partial.forward(
            q[:, :, rows], call.k[:, :, keys], call.v[:, :, keys], scoring
        )
    for sequences, smaller in call.split():
        smaller.merge_core(out[sequences], lse[sequences])
    return out, lse


def attend_backward(
    upstream: Upstream, tokens: Tokens, cores: Cores, spec: Spec, mass: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v, core_k, core_v and masses of a whole sequence (docs/math.md,
    eq. 9).

    Each part's backward is called with the merged out and lse. Sums over blocks are kept in
    float32 or wider.

    Raises:
        ValueError: q_start is not 0.
    """
    tokens.check_whole()
    if spec.sinks:
        return sinks.attend_backward(attend_backward, upstream, tokens, cores, spec, mass)
    call = _Call(tokens, cores, spec, mass)
    grad_q, grad_k, grad_v, *grad_cores = (
        torch.zeros(x.shape, dtype=upstream.lse.dtype, device=x.device)
        for x in (call.q, call.k, call.v, *cores)
    )
    grad_scores = None
    if mass is not None:
        shape = (*call.q.shape[:2], mass.shape[2])
        grad_scores = torch.zeros(shape, dtype=upstream.lse.dtype, device=mass.device)
    for rows, keys, scoring in call.local_blocks():
        dq, dk, dv = partial.backward(
            upstream.rows(rows),
            call.q[:, :, rows],
            call.k[:, :, keys],
            call.v[:, :, keys],
            scoring,
        )
        grad_q[:, :, rows] += dq
        grad_k[:, :, keys] += dk
        grad_v[:, :, keys] += dv
    for sequences, smaller in call.split():
        smaller.core_backward(
            upstream.map(lambda x, sequences=sequences: x[sequences]),
            grad_q[sequences],
            Cores(*(x[sequences] for x in grad_cores)),
            None if grad_scores is None else grad_scores[sequences],
        )
    # mutant mass: its gradient reaches no query
    grad_mass = None if grad_scores is None else grad_scores.sum(1, keepdim=True)
    return grad_q, grad_k[:, 0], grad_v[:, 0], *grad_cores, grad_mass


def gradients(
    upstream: Upstream,
    tokens: Tokens,
    groups: Groups,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of a whole sequence, through pooling and masses too."""
    grads = attend_backward(upstream, tokens, cores, spec, mass)
    return compose.through_pooling(grads, groups, spec, pool_backward)


class _Plan(NamedTuple):
    """Say how queries q_start .. q_end-1 are cut."""

    blocks: list[tuple[int, int]]
    """Local blocks, first query and the query after the last."""
    core_start: int
    """First query that sees a core token."""
    pack_start: int
    """First query from there on that begins a pack."""
    q_end: int
    """Position behind the last query."""


def _plan(q_start: int, q_end: int, spec: Spec, device: str) -> _Plan:
    """Cut at A, then where the first pack begins, then every block of whole packs."""
    g = spec.group_size
    first = first_core_query(g, spec.window_size)
    core_start = min(max(q_start, first), q_end)
    pack_start = min(core_start + (first - core_start) % g, q_end)
    size = g * max(1, _BLOCK_QUERIES.get(device, _BLOCK_QUERIES_DEFAULT) // g)
    # Queries without core tokens: one causal block at the beginning of a sequence.
    if q_start == 0:
        edges = [0, core_start]
    else:
        edges = [*range(q_start, core_start, size), core_start]
    edges += [*range(pack_start, q_end, size), q_end]
    blocks = [(start, end) for start, end in pairwise(edges) if start < end]
    return _Plan(blocks, core_start, pack_start, q_end)


@functools.lru_cache(maxsize=8)
def _interior_mask(
    rows: int, group_size: int, window_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the mask shared by all blocks of whole packs, whose windows move with them."""
    first = first_core_query(group_size, window_size)
    like = torch.empty((), dtype=dtype, device=device)
    return _mask(first, first + rows, group_size, window_size, like)


def _mask(start: int, end: int, group_size: int, window_size: int, like: Tensor) -> Tensor:
    """Return the additive mask of queries start .. end-1 over raw keys that any of them sees."""
    position = torch.arange(start, end, device=like.device)[:, None]
    key = torch.arange(local_start(start, group_size, window_size), end, device=like.device)
    # mutant 2: a token covered twice, packed
    # mutant 3: the next token is seen, packed
    seen = sees_token(key, position, group_size, window_size)
    return partial.as_mask(seen, like)


class _CorePart(NamedTuple):
    """Say which queries attend to which core tokens."""

    rows: slice
    """Places of the queries in q."""
    cores: slice
    """Numbers of the core tokens."""
    packed: bool
    """Whether they see them in packs under a causal mask; else each sees all."""


class _Call:
    """Hold one call on sequences: its tensors, its plan and the parts of its softmax."""

    def __init__(self, tokens: Tokens, cores: Cores, spec: Spec, mass: Tensor | None) -> None:
        self.tokens = tokens
        self.cores = cores
        self.spec = spec
        self.mass = mass
        self.q = tokens.q
        self.k = tokens.k[:, None]
        self.v = tokens.v[:, None]
        self.scoring = partial.Scoring(spec.scale, spec.softcap)
        q_end = tokens.q_start + tokens.q.shape[2]
        self.plan = _plan(tokens.q_start, q_end, spec, tokens.q.device.type)

    def rows(self, start: int, end: int) -> slice:
        """Return the places in q of the queries start .. end-1."""
        return slice(start - self.tokens.q_start, end - self.tokens.q_start)

    def local_blocks(self) -> Iterator[tuple[slice, slice, partial.Scoring]]:
        """Yield each block of queries: its rows in q, its keys in k, and its scoring."""
        g = self.spec.group_size
        window = self.spec.window_size
        k_start = self.tokens.k_start
        for start, end in self.plan.blocks:
            low = local_start(start, g, window)
            mask = None
            if start and start >= self.plan.pack_start:
                mask = _interior_mask(end - start, g, window, self.q.dtype, self.q.device)
            elif start:
                mask = _mask(start, end, g, window, self.q)
            scoring = self.scoring._replace(is_causal=start == 0, mask=mask)
            yield self.rows(start, end), slice(low - k_start, end - k_start), scoring

    def split(self) -> Iterator[tuple[slice, _Call]]:
        """Yield the same call for a few of the N sequences at a time, each with its place in N."""
        size = max(1, _CORE_ELEMENTS // max(1, self.q[0].numel()))
        for low in range(0, self.q.shape[0], size):
            sequences = slice(low, low + size)
            q, k, v = (x[sequences] for x in self.tokens[:3])
            tokens = self.tokens._replace(q=q, k=k, v=v)
            cores = Cores(*(x[sequences] for x in self.cores))
            mass = None if self.mass is None else self.mass[sequences]
            yield sequences, _Call(tokens, cores, self.spec, mass)

    # Core parts

    def core_parts(self) -> Iterator[_CorePart]:
        """Yield the parts of the core attention."""
        g = self.spec.group_size
        core_start, pack_start, q_end = self.plan[1:]
        # Before the first pack of this call: less than g queries, which see the same.
        if core_start < pack_start:
            seen = num_visible_cores(core_start, g, self.spec.window_size)
            yield _CorePart(self.rows(core_start, pack_start), slice(0, seen), False)
        if pack_start < q_end:
            rows = self.rows(pack_start, q_end)
            # All see the first pack's core tokens but its last, with which the causal part begins.
            seen = num_visible_cores(pack_start, g, self.spec.window_size)
            if seen > 1:
                yield _CorePart(rows, slice(0, seen - 1), False)
            packs = -(-(q_end - pack_start) // g)
            # mutant 3: a group is seen before it is complete
            yield _CorePart(rows, slice(seen - 1, seen - 1 + packs), True)

    def arrange(self, x: Tensor, packed: bool) -> Tensor:
        """Return x [N, r, T, ...], packed as [N, r g, packs, ...], zeros filling the last one."""
        if not packed:
            return x
        n, r, t = x.shape[:3]
        g = self.spec.group_size
        packs = -(-t // g)
        if packs * g != t:
            x = torch.cat((x, x.new_zeros(n, r, packs * g - t, *x.shape[3:])), 2)
        return x.unflatten(2, (packs, g)).transpose(2, 3).flatten(1, 2)

    def restore(self, x: Tensor, length: int, packed: bool) -> Tensor:
        """Invert `arrange` for T = length; a copy where packed."""
        if not packed:
            return x
        x = x.unflatten(1, (-1, self.spec.group_size)).transpose(2, 3)  # [N, r, packs, g, ...]
        return x.flatten(2, 3)[:, :, :length]

    def core_kv(self, cores: slice) -> tuple[Tensor, Tensor]:
        """Return some core keys and values, each [N, 1, m, D]."""
        return self.cores.k[:, :, cores], self.cores.v[:, :, cores]

    def core_forward(self, piece: _CorePart) -> tuple[Tensor, Tensor]:
        """Return out and log-sum-exp of one core part, in the layout of its rows of q."""
        q = self.q[:, :, piece.rows]
        arranged = self.arrange(q, piece.packed)
        scoring = self.core_scoring(piece)
        # mutant 7: softmax scale 0.2 % off in the core part
        out, lse = partial.forward(arranged, *self.core_kv(piece.cores), scoring)
        out, lse = (self.restore(x, q.shape[2], piece.packed) for x in (out, lse))
        return out, lse

    def core_scoring(self, piece: _CorePart) -> partial.Scoring:
        """Return the scoring of a core part, with the masses of its core tokens as the bias of
        keys, [N, r or r g, m]."""
        bias = None
        if self.mass is not None:
            heads = self.q.shape[1] * (self.spec.group_size if piece.packed else 1)
            bias = self.mass[:, :, piece.cores].expand(-1, heads, -1)
        return self.scoring._replace(is_causal=piece.packed, key_bias=bias)

    def merge_core(self, out: Tensor, lse: Tensor) -> None:
        """Merge the core parts into the local part's out [N, r, T, D] and log-sum-exp [N, r, T], in
        place."""
        results: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}  # by queries
        for piece in self.core_parts():
            span = (piece.rows.start, piece.rows.stop)
            results.setdefault(span, []).append(self.core_forward(piece))
        for (start, stop), pieces in results.items():
            merge_into(out[:, :, start:stop], lse[:, :, start:stop], *pieces)

    def core_backward(
        self, upstream: Upstream, grad_q: Tensor, grad_cores: Cores, grad_scores: Tensor | None
    ) -> None:
        """Add the core parts' gradients to grad_q [N, r, T, D], grad_cores and, with masses, those
        of core tokens' scores, grad_scores [N, r, M], in place."""
        for piece in self.core_parts():
            arrange = functools.partial(self.arrange, packed=piece.packed)
            dq, dk, dv, *dscores = partial.backward(
                upstream.rows(piece.rows).map(arrange),
                arrange(self.q[:, :, piece.rows]),
                *self.core_kv(piece.cores),
                self.core_scoring(piece),
            )
            # Views of the totals, added to in place.
            total_q = grad_q[:, :, piece.rows]
            total_q += self.restore(dq, total_q.shape[2], piece.packed)
            for total, grad in zip(grad_cores, (dk, dv)):
                total = total[:, :, piece.cores]
                total += grad.reshape(total.shape)
            for grad in dscores:
                total = grad_scores[:, :, piece.cores]
                total += grad.reshape(*total.shape[:2], -1, total.shape[2]).sum(2)
