"""Attend with fetch in plain torch, block by block of queries: linear memory, forward and backward.

A block has three parts of one softmax, over disjoint keys: raw tokens that its queries see in any
case (first tokens and window), core tokens that they have not chosen, and raw tokens of the groups
that they have. Each query's choice comes from index scores and has no gradient. Parts meet in
`merge`; the backward calls each part's with the merged result (docs/math.md, eq. 8 and 9).

The chosen raw tokens are either all raw tokens of the far past under a mask of each query, at the
price of full attention, or gathered for each query, at the price of moving 2 k g rows of D numbers.
The cheaper one is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.ops import partial
from corecontext.ops.fetch import core_part, gathered
from corecontext.ops.fetch.choice import (
    choose,
    expand,
    last_of_shares,
    mean_of_shares,
    to_indices,
    to_mask,
)
from corecontext.ops.fetch.index import Index, build, centre_of, num_parts, scores
from corecontext.ops.merge import merge
from corecontext.ops.spec import Cores, Spec, Tokens, Upstream
from corecontext.visibility import local_start, num_visible_cores, sees_core, sees_token

_BLOCK_QUERIES = {"cpu": 128}
_BLOCK_QUERIES_DEFAULT = 512
# Elements of a block's index scores, of its mask over raw tokens, of the keys gathered at once.
_ELEMENTS = {"cpu": 1 << 22}
_ELEMENTS_DEFAULT = 1 << 28
# A gathered token costs a query head as much as this many under a mask: copies against products.
_GATHER_COST = {"cpu": 16}
_GATHER_COST_DEFAULT = 100


class Gradients(NamedTuple):
    """Collect the gradients of a call, in float32 or wider."""

    q: Tensor
    """[N, r, T, D]."""
    k: Tensor
    """[N, S, D]."""
    v: Tensor
    """[N, S, D]."""
    core_k: Tensor
    """[N, 1 or r, M, D]."""
    core_v: Tensor
    """[N, 1 or r, M, D]."""
    scores: Tensor
    """Of each core token's scores, summed over queries, [N, r, M]."""


def attend(
    tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with fetch from any queries of a sequence.

    Args:
        tokens: All raw tokens from position 0 on.
        cores: Core tokens of the complete groups after the first tokens kept raw.
        core_bias: Added to their scores, [N, r] or [N, r, M], or None.

    Returns:
        out [N, r, T, D] in the dtype of q; log-sum-exp [N, r, T] in float32 or wider; the groups
        fetched, numbers counted as core tokens are, [N, C, k] in int32, a row for each query or
        share of queries, rising and filled with -1.
    """
    call = _Call(tokens, cores, spec, core_bias)
    q = tokens.q
    index = build(call.group_keys(), spec.fetch_index, centre_of(tokens.k, spec))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
    choice = torch.full(
        (q.shape[0], call.num_choices, spec.fetch_groups), -1, dtype=torch.int32, device=q.device
    )
    for block in call.blocks():
        results = block.forward(index, choice[block.heads, block.choices])
        out[block.heads, :, block.rows], lse[block.heads, :, block.rows] = results
    return out, lse, choice


def attend_backward(
    upstream: Upstream,
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None,
    choice: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v, core_k, core_v and core_bias, given the forward's choice."""
    call = _Call(tokens, cores, spec, core_bias)
    q, k, v = tokens[:3]
    shapes = (q.shape, k.shape, v.shape, cores.k.shape, cores.v.shape)
    bias_shape = (q.shape[0], q.shape[1], cores.k.shape[2])
    total = Gradients(
        *(torch.zeros(x, dtype=upstream.lse.dtype, device=q.device) for x in (*shapes, bias_shape))
    )
    for block in call.blocks():
        results = upstream.map(lambda x, block=block: x[block.heads, :, block.rows])
        grads = Gradients(*(x[block.heads] for x in total))
        block.backward(results, choice[block.heads, block.choices], grads)
    grad_bias = None
    if core_bias is not None:
        grad_bias = total.scores if core_bias.dim() == 3 else total.scores.sum(-1)
    return *total[:5], grad_bias


class _Call:
    """One call on whole sequences, and how it is cut into blocks."""

    def __init__(self, tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None) -> None:
        if tokens.k_start or tokens.sink_k is not None:
            raise ValueError("tokens must begin at position 0 for fetch. Give all raw tokens.")
        self.tokens = tokens
        self.cores = cores
        self.spec = spec
        self.core_bias = core_bias
        self.start = tokens.q_start
        self.end = tokens.q_start + tokens.q.shape[2]

    def group_keys(self) -> Tensor:
        """Return the raw keys of the groups that have core tokens, [N, M, g, D]."""
        first = self.spec.sinks
        g = self.spec.group_size
        count = self.cores.k.shape[2]
        return self.tokens.k[:, first : first + count * g].unflatten(1, (count, g))

    @property
    def num_choices(self) -> int:
        """Choices of the call: C."""
        share = self.spec.fetch_share
        return -(-self.end // share) - self.start // share

    def blocks(self) -> Iterator[_Block]:
        """Yield blocks of queries that end at multiples of fetch_share, for as many sequences at a
        time as the memory allows."""
        q = self.tokens.q
        share = self.spec.fetch_share
        kind = q.device.type
        size = share * max(1, _BLOCK_QUERIES.get(kind, _BLOCK_QUERIES_DEFAULT) // share)
        width = max(1, q.shape[1] * num_parts(self.spec.fetch_index, self.spec.group_size))
        width = max(self.spec.group_size, width) * self.cores.k.shape[2] + self.spec.window_size
        elements = _ELEMENTS.get(kind, _ELEMENTS_DEFAULT)
        heads = max(1, elements // (min(size, q.shape[2]) * width))
        for low in range(0, q.shape[0], heads):
            start = self.start
            while start < self.end:
                end = min(start - start % size + size, self.end)
                yield _Block(self, slice(low, min(low + heads, q.shape[0])), start, end)
                start = end


class _Block:
    """Queries start .. end - 1 of some sequences: the parts of their softmax."""

    def __init__(self, call: _Call, heads: slice, start: int, end: int) -> None:
        self.spec = call.spec
        self.heads = heads
        self.start = start
        self.end = end
        self.rows = slice(start - call.start, end - call.start)
        share = call.spec.fetch_share
        first_choice = call.start // share
        self.choices = slice(start // share - first_choice, -(-end // share) - first_choice)
        self.q = call.tokens.q[heads, :, self.rows]
        self.k = call.tokens.k[heads]
        self.v = call.tokens.v[heads]
        self.core_bias = None if call.core_bias is None else call.core_bias[heads]
        g = self.spec.group_size
        window = self.spec.window_size
        # Groups behind the first tokens that the last query sees, and which each query sees.
        first = self.spec.sinks // g
        self.num_groups = max(0, num_visible_cores(end - 1, g, window) - first)
        self.cores = Cores(*(x[heads, :, : self.num_groups] for x in call.cores))
        if self.core_bias is not None and self.core_bias.dim() == 3:
            self.core_bias = self.core_bias[:, :, : self.num_groups]
        self.position = torch.arange(start, end, device=self.q.device)[:, None]
        groups = torch.arange(self.num_groups, device=self.q.device) + first
        self.visible = sees_core(groups, self.position, g, window)  # [T, M]
        self.options = {"scale": self.spec.scale, "softcap": self.spec.softcap}

    # The whole
    # ---------

    def forward(self, index: Index, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and log-sum-exp of the block's queries; write their choice [n, C, k]."""
        k, v, bias, _ = self._local()
        results = [partial.forward(self.q, k, v, bias=bias, **self.options)]
        if self.num_groups:
            marks = self._choose(index)
            k = self.spec.fetch_groups
            choice.copy_(to_indices(marks, k))
            fetched = self._fetched(marks)
            unfetched = self.visible & ~fetched
            results.append(
                core_part.forward(self.q, self.cores, self.spec, self.core_bias, unfetched)
            )
            results.append(self._raw_forward(fetched, choice))
        outs, lses = zip(*results)
        return merge(list(outs), list(lses))

    def backward(self, upstream: Upstream, choice: Tensor, grads: Gradients) -> None:
        """Add the gradients of the block to those of its sequences, given its choice."""
        k, v, bias, spans = self._local()
        dq, dk, dv = partial.backward(upstream, self.q, k, v, bias=bias, **self.options)
        grad_q = grads.q[:, :, self.rows]
        grad_q += dq
        for total, grad in ((grads.k, dk), (grads.v, dv)):
            for span, piece in zip(spans, grad[:, 0].split([s.stop - s.start for s in spans], 1)):
                total[:, span] += piece
        if not self.num_groups:
            return
        fetched = self._fetched(to_mask(choice, self.num_groups))
        unfetched = self.visible & ~fetched
        dq, dk, dv, dscores = core_part.backward(
            upstream, self.q, self.cores, self.spec, self.core_bias, unfetched
        )
        grad_q += dq
        # mutant fetch: gradient of the core keys dropped
        grads.core_k[:, :, : self.num_groups] += dk
        grads.core_v[:, :, : self.num_groups] += dv
        grads.scores[:, :, : self.num_groups] += dscores
        grad_q += self._raw_backward(upstream, fetched, choice, grads)

    def _choose(self, index: Index) -> Tensor:
        """Mark the groups of each choice, [n, C, M]: of each query, or of the mean query of a share
        and the groups that its last query sees."""
        sharing = (self.start, self.spec.fetch_share)
        index = index.sequences(self.heads).first(self.num_groups)
        estimates = scores(index, mean_of_shares(self.q, *sharing), self.spec)
        visible = last_of_shares(self.visible, *sharing)
        return choose(estimates, visible, self.spec.fetch_groups)

    def _fetched(self, marks: Tensor) -> Tensor:
        """Mark the groups that each query fetches, [n, T, M]; of a shared choice those that it
        sees."""
        marks = expand(marks, self.start, self.end - self.start, self.spec.fetch_share)
        # mutant fetch: a shared choice shows groups before they are far past
        return marks & self.visible

    # Raw tokens seen in any case
    # ---------------------------

    def _local(self) -> tuple[Tensor, Tensor, Tensor, list[slice]]:
        """Keys and values [n, 1, S, D] of first tokens and windows, their mask [1, 1, T, S], and
        the tokens that they are."""
        g = self.spec.group_size
        window = self.spec.window_size
        sinks = self.spec.sinks
        low = local_start(self.start, g, window)
        spans = [slice(low, self.end)]
        if low > sinks > 0:
            spans.insert(0, slice(0, sinks))
        elif sinks:
            spans = [slice(0, self.end)]
        keys = torch.cat([torch.arange(s.start, s.stop, device=self.q.device) for s in spans])
        # mutant fetch: first tokens are not seen
        mask = sees_token(keys, self.position, g, window, sinks)
        k, v = (
            torch.cat([x[:, span] for span in spans], 1) if len(spans) > 1 else x[:, spans[0]]
            for x in (self.k, self.v)
        )
        return k[:, None], v[:, None], partial.mask_bias(mask, self.q)[None, None], spans

    # Raw tokens of the groups fetched
    # --------------------------------

    @property
    def _gathers(self) -> bool:
        """Whether gathering costs less than a mask over all groups."""
        cost = _GATHER_COST.get(self.q.device.type, _GATHER_COST_DEFAULT)
        return self.num_groups * self.q.shape[1] > cost * self.spec.fetch_groups

    def _groups(self, x: Tensor) -> Tensor:
        """Raw tokens of the visible groups, [n, M g, D]."""
        first = self.spec.sinks
        return x[:, first : first + self.num_groups * self.spec.group_size]

    def _raw_forward(self, fetched: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Attention to the raw tokens fetched; rows without any are 0 with -inf."""
        if self._gathers:
            out, lse = gathered.forward(self._gather(choice), self.spec)
        else:
            k, v, bias = self._masked(fetched)
            out, lse = partial.forward(self.q, k, v, bias=bias, **self.options)
        has_any = fetched.any(-1)[:, None]
        return torch.where(has_any[..., None], out, 0), torch.where(has_any, lse, -torch.inf)

    def _raw_backward(
        self, upstream: Upstream, fetched: Tensor, choice: Tensor, grads: Gradients
    ) -> Tensor:
        """Add the gradients of the raw tokens fetched, and return that of q."""
        if self._gathers:
            dq, dk, dv = gathered.backward(upstream, self._gather(choice), self.spec)
        else:
            k, v, bias = self._masked(fetched)
            dq, dk, dv = partial.backward(upstream, self.q, k, v, bias=bias, **self.options)
        self._groups(grads.k).add_(dk.flatten(1, -2))
        self._groups(grads.v).add_(dv.flatten(1, -2))
        return dq

    def _gather(self, choice: Tensor) -> gathered.Gather:
        """Return the queries, the visible groups and the numbers that each query fetches."""
        choice = expand(choice, self.start, self.end - self.start, self.spec.fetch_share)
        # Of a shared choice a query drops the groups that it does not see.
        choice = choice.masked_fill(choice >= self.visible.sum(-1, keepdim=True), -1)
        groups = (self._groups(x).unflatten(1, (self.num_groups, -1)) for x in (self.k, self.v))
        elements = _ELEMENTS.get(self.q.device.type, _ELEMENTS_DEFAULT)
        return gathered.Gather(self.q, *groups, choice, elements)

    def _masked(self, fetched: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [n, 1, M g, D] of all visible groups, and the mask [n, 1, T, M g]."""
        k, v = (self._groups(x)[:, None] for x in (self.k, self.v))
        bias = partial.mask_bias(fetched, self.q).repeat_interleave(self.spec.group_size, -1)
        return k, v, bias[:, None]
