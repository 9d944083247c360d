"""Attend with fetch in plain torch, block by block of queries: linear memory, forward and backward.

A block has three parts of one softmax, over disjoint keys: raw tokens that its queries see in any
case (first tokens and window), core tokens that they have not chosen, and raw tokens of the groups
that they have. The choice comes first, from index scores, and has no gradient. Parts meet in
`merge`; the backward calls each part's with the merged result (docs/math.md, eq. 8 and 9).

A query attends to the raw tokens that it has chosen in one of two ways: to all raw tokens of the
far past under a mask, at the price of full attention, or to gathered copies, at the price of moving
2 k g rows of D numbers. The cheaper one is taken.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.ops import compose, partial, pooling
from corecontext.ops.fetch import choice as choosing
from corecontext.ops.fetch import core_part, gathered
from corecontext.ops.fetch.choice import Choice, mean_of_shares, to_marks
from corecontext.ops.fetch.scoring import Queries, centre_of, group_keys, scores
from corecontext.ops.merge import merge
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream
from corecontext.visibility import local_start, num_visible_cores, sees_core, sees_token

# Queries of a block, by device.
_BLOCK_QUERIES = {"cpu": 128}
_BLOCK_QUERIES_DEFAULT = 512
# Most elements of a block's index scores, of its mask over raw tokens, of keys gathered at once.
_ELEMENTS = {"cpu": 1 << 22}
_ELEMENTS_DEFAULT = 1 << 28
# Gathering costs less than a mask where r M > cost k: it copies k groups of a query once for its r
# heads, and under a mask each head scores all M.
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
    """[N, 1, M, D]."""
    core_v: Tensor
    """[N, 1, M, D]."""
    scores: Tensor
    """Of core tokens' scores, summed over queries, [N, r, M]; their sum over r is the masses'."""


def choose(tokens: Tokens, num_groups: int, spec: Spec) -> Choice:
    """Choose the groups of each query, or share of queries, of a sequence.

    Args:
        tokens: All raw tokens from position 0 on.
        num_groups: Complete groups after the first tokens kept raw: M.
    """
    call = _Call(tokens, num_groups, spec)
    q = tokens.q
    centre = centre_of(tokens.k, spec)
    stored = spec.index.encode(group_keys(tokens.k, spec, num_groups), centre)
    means = mean_of_shares(q, call.start, spec.fetch_share)
    queries = Queries.of(means, spec.index, centre)
    groups = torch.full(
        (q.shape[0], means.shape[2], spec.fetch_groups), -1, dtype=torch.int32, device=q.device
    )
    for block in call.blocks(spec.index.num_keys(spec.group_size), spec.fetch_share):
        if not block.num_groups:
            continue
        visible = block.see_groups(block.ends_of_shares(q.device))
        keys = tuple(x[block.sequences, : block.num_groups] for x in stored)
        estimates = scores(keys, queries.part(block.sequences, block.shares), spec)
        chosen = choosing.choose(estimates, visible, spec.fetch_groups)
        groups[block.sequences, block.shares] = chosen
    return Choice(groups, spec.fetch_share)


def encode(keys: Tensor, centre: Tensor | None, spec: Spec) -> tuple[Tensor, ...]:
    """Return what the index stores of groups: in PyTorch, as `encode` of a backend's kernels."""
    return spec.index.encode(keys, centre)


def attend(
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None,
    choice: Choice,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with fetch from any queries of a sequence.

    Args:
        tokens: All raw tokens from position 0 on.
        cores: Core tokens of the complete groups after the first tokens kept raw.
        mass: Added to their scores, [N, 1, M], or None.
        out: [N, r, T, D], written in place; None makes one.

    Returns:
        out [N, r, T, D] in the dtype of q; log-sum-exp [N, r, T] in float32 or wider.
    """
    call = _Call(tokens, cores.k.shape[2], spec)
    q = tokens.q
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
    for block in call.blocks():
        results = _Parts(block, tokens, cores, mass, choice).forward()
        out[block.sequences, :, block.rows], lse[block.sequences, :, block.rows] = results
    return out, lse


def attend_backward(
    upstream: Upstream,
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None,
    choice: Choice,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v, core_k, core_v and masses, for a choice."""
    call = _Call(tokens, cores.k.shape[2], spec)
    q, k, v = tokens[:3]
    shapes = (q.shape, k.shape, v.shape, cores.k.shape, cores.v.shape)
    shapes = (*shapes, (q.shape[0], q.shape[1], cores.k.shape[2]))
    total = Gradients(*(torch.zeros(x, dtype=upstream.lse.dtype, device=q.device) for x in shapes))
    for block in call.blocks():
        results = upstream.map(lambda x, block=block: x[block.sequences, :, block.rows])
        grads = Gradients(*(x[block.sequences] for x in total))
        _Parts(block, tokens, cores, mass, choice).backward(results, grads)
    return *total[:5], None if mass is None else total.scores.sum(1, keepdim=True)


def gradients(
    upstream: Upstream,
    tokens: Tokens,
    groups: Groups,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None,
    choice: Choice,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of a whole sequence, for a choice."""
    grads = attend_backward(upstream, tokens, cores, spec, mass, choice)
    return compose.through_pooling(grads, groups, spec, pooling.backward)


# Blocks of queries


class _Block(NamedTuple):
    """Hold the place of a block: queries start .. end - 1 of some sequences."""

    spec: Spec
    sequences: slice
    """Places among the N sequences."""
    start: int
    end: int
    rows: slice
    """Places of the queries in the call's q."""
    shares: slice
    """Places among the C shares of the call."""
    num_groups: int
    """Groups after the sinks that the last query sees."""

    def ends_of_shares(self, device: torch.device) -> Tensor:
        """Return the position of the last query of each share of the block, [C]."""
        share = self.spec.fetch_share
        ends = torch.arange(self.start - self.start % share, self.end, share, device=device)
        return (ends + share - 1).clamp(max=self.end - 1)

    def see_groups(self, position: Tensor) -> Tensor:
        """Return which of the block's groups the queries at these positions, [T], see: [T, M]."""
        spec = self.spec
        first = spec.sinks // spec.group_size
        groups = torch.arange(self.num_groups, device=position.device) + first
        return sees_core(groups, position[:, None], spec.group_size, spec.window_size)


class _Call:
    """Cut a call on whole sequences into blocks."""

    def __init__(self, tokens: Tokens, num_groups: int, spec: Spec) -> None:
        if tokens.k_start or tokens.sink_k is not None:
            raise ValueError("tokens must begin at position 0 for fetch. Give all raw tokens.")
        self.q = tokens.q
        self.num_groups = num_groups
        self.spec = spec
        self.start = tokens.q_start
        self.end = tokens.q_start + tokens.q.shape[2]

    def blocks(self, keys_of_group: int = 1, share: int = 1) -> Iterator[_Block]:
        """Yield blocks of queries that end at multiples of `share`, for as many sequences at a
        time as _ELEMENTS allows; `keys_of_group` counts a head's scores of a group."""
        spec = self.spec
        kind = self.q.device.type
        size = share * max(1, _BLOCK_QUERIES.get(kind, _BLOCK_QUERIES_DEFAULT) // share)
        width = max(spec.group_size, self.q.shape[1] * keys_of_group)
        width = width * self.num_groups + spec.window_size
        elements = _ELEMENTS.get(kind, _ELEMENTS_DEFAULT)
        count = max(1, elements // (min(size, self.q.shape[2]) * width))
        for low in range(0, self.q.shape[0], count):
            start = self.start
            while start < self.end:
                end = min(start - start % size + size, self.end)
                yield self._block(slice(low, min(low + count, self.q.shape[0])), start, end)
                start = end

    def _block(self, sequences: slice, start: int, end: int) -> _Block:
        spec = self.spec
        g = spec.group_size
        window = spec.window_size
        first = spec.sinks // g
        num_groups = max(0, num_visible_cores(end - 1, g, window) - first)
        rows = slice(start - self.start, end - self.start)
        first_share = self.start // spec.fetch_share
        last_share = -(-end // spec.fetch_share)
        shares = slice(start // spec.fetch_share - first_share, last_share - first_share)
        return _Block(spec, sequences, start, end, rows, shares, num_groups)


class _Parts:
    """Compute the three parts of the softmax of a block's queries."""

    def __init__(
        self,
        block: _Block,
        tokens: Tokens,
        cores: Cores,
        mass: Tensor | None,
        choice: Choice,
    ) -> None:
        sequences = block.sequences
        self.block = block
        self.spec = block.spec
        self.num_groups = block.num_groups
        self.q = tokens.q[sequences, :, block.rows]
        self.k = tokens.k[sequences]
        self.v = tokens.v[sequences]
        self.cores = Cores(*(x[sequences, :, : block.num_groups] for x in cores))
        self.mass = None if mass is None else mass[sequences, :, : block.num_groups]
        # The groups of each query, of n sequences: numbers [n, T, k], and marks [n, T, M].
        visible = block.see_groups(torch.arange(block.start, block.end, device=tokens.q.device))
        seen = visible.sum(-1)
        self.chosen = choice.part(sequences, block.shares).of_queries(block.start, seen)
        self.fetched = to_marks(self.chosen, block.num_groups)
        self.unfetched = visible & ~self.fetched

    # The whole

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return out and log-sum-exp of the block's queries."""
        k, v, scoring, _ = self._local()
        results = [partial.forward(self.q, k, v, scoring)]
        if self.num_groups:
            results.append(
                core_part.forward(self.q, self.cores, self.spec, self.mass, self.unfetched)
            )
            results.append(self._raw_forward())
        outs, lses = zip(*results)
        return merge(list(outs), list(lses))

    def backward(self, upstream: Upstream, grads: Gradients) -> None:
        """Add the gradients of the block to those of its sequences."""
        k, v, scoring, spans = self._local()
        dq, dk, dv = partial.backward(upstream, self.q, k, v, scoring)
        grad_q = grads.q[:, :, self.block.rows]
        grad_q += dq
        for total, grad in ((grads.k, dk), (grads.v, dv)):
            for span, piece in zip(spans, grad[:, 0].split([s.stop - s.start for s in spans], 1)):
                total[:, span] += piece
        if not self.num_groups:
            return
        dq, dk, dv, dscores = core_part.backward(
            upstream, self.q, self.cores, self.spec, self.mass, self.unfetched
        )
        grad_q += dq
        # mutant fetch: gradient of the core keys dropped
        grads.core_k[:, :, : self.num_groups] += dk
        grads.core_v[:, :, : self.num_groups] += dv
        grads.scores[:, :, : self.num_groups] += dscores
        grad_q += self._raw_backward(upstream, grads)

    # Raw tokens seen in any case

    def _scoring(self, seen: Tensor) -> partial.Scoring:
        """Return the scoring of keys, by which of them queries see, [1 or n, T, S]."""
        mask = partial.as_mask(seen, self.q)[:, None]
        return partial.Scoring(self.spec.scale, self.spec.softcap, mask=mask)

    def _local(self) -> tuple[Tensor, Tensor, partial.Scoring, list[slice]]:
        """Return the keys and the values [n, 1, S, D] of sinks and windows, their scoring, and the
        spans of positions that they come from."""
        g = self.spec.group_size
        window = self.spec.window_size
        sinks = self.spec.sinks
        start = self.block.start
        end = self.block.end
        low = local_start(start, g, window)
        spans = [slice(low, end)]
        if low > sinks > 0:
            spans.insert(0, slice(0, sinks))
        elif sinks:  # the window begins among them or right after
            spans = [slice(0, end)]
        keys = torch.cat([torch.arange(s.start, s.stop, device=self.q.device) for s in spans])
        position = torch.arange(start, end, device=self.q.device)[:, None]
        # mutant fetch: first tokens are not seen
        mask = sees_token(keys, position, g, window, sinks)
        k, v = (
            torch.cat([x[:, span] for span in spans], 1) if len(spans) > 1 else x[:, spans[0]]
            for x in (self.k, self.v)
        )
        return k[:, None], v[:, None], self._scoring(mask[None]), spans

    # Raw tokens of the groups fetched

    @property
    def _gathers(self) -> bool:
        """Whether gathering costs less than a mask over all groups: r M > cost k."""
        cost = _GATHER_COST.get(self.q.device.type, _GATHER_COST_DEFAULT)
        return self.num_groups * self.q.shape[1] > cost * self.chosen.shape[2]

    def _groups(self, x: Tensor) -> Tensor:
        """Return the raw tokens of the block's groups, [n, M g, D]."""
        first = self.spec.sinks
        return x[:, first : first + self.num_groups * self.spec.group_size]

    def _raw_forward(self) -> tuple[Tensor, Tensor]:
        """Attend to the raw tokens fetched; queries without any give 0 with -inf."""
        if self._gathers:
            out, lse = gathered.forward(self._gather(), self.spec)
        else:
            out, lse = partial.forward(self.q, *self._masked())
        has_any = self.fetched.any(-1)[:, None]
        return torch.where(has_any[..., None], out, 0), torch.where(has_any, lse, -torch.inf)

    def _raw_backward(self, upstream: Upstream, grads: Gradients) -> Tensor:
        """Add the gradients of the raw tokens fetched, and return that of q."""
        if self._gathers:
            dq, dk, dv = gathered.backward(upstream, self._gather(), self.spec)
        else:
            dq, dk, dv = partial.backward(upstream, self.q, *self._masked())
        self._groups(grads.k).add_(dk.flatten(1, -2))
        self._groups(grads.v).add_(dv.flatten(1, -2))
        return dq

    def _gather(self) -> gathered.Gather:
        """Return the queries, the block's groups and the numbers that each query fetches."""
        groups = (self._groups(x).unflatten(1, (self.num_groups, -1)) for x in (self.k, self.v))
        elements = _ELEMENTS.get(self.q.device.type, _ELEMENTS_DEFAULT)
        return gathered.Gather(self.q, *groups, self.chosen, elements)

    def _masked(self) -> tuple[Tensor, Tensor, partial.Scoring]:
        """Return keys and values [n, 1, M g, D] of the block's groups, and their scoring."""
        k, v = (self._groups(x)[:, None] for x in (self.k, self.v))
        return k, v, self._scoring(self.fetched.repeat_interleave(self.spec.group_size, -1))
