"""Attend to the raw tokens of chosen groups on any GPU, and merge with attention to all else that a
query sees, whose results and gradients come in and are completed in place.

`choice.groups` is [N, C, k]. A tile's rows are the queries of one share with all r query heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corecontext.ops.fetch.choice import Choice
from corecontext.ops.spec import Cores, Spec, Tokens, Upstream
from corecontext.ops.triton.attend.anywhere import rule_of
from corecontext.ops.triton.attend.marks import Marks, mark
from corecontext.ops.triton.attend.raw import (
    RawForm,
    fetch_dkv_kernel,
    fetch_dq_kernel,
    fetch_fwd_kernel,
)
from corecontext.ops.triton.attend.unions import Unions, unite
from corecontext.ops.triton.launch import ceil_div, contiguous_rows, ints, launch, power_of_2
from corecontext.ops.triton.tiles import (
    Chip,
    Tiles,
    chip_of,
    fetch_dkv_tiles,
    fetch_dq_tiles,
    fetch_tiles,
)

_MARK_BYTES = 256 << 20  # most bytes of marks at a time


class Call(NamedTuple):
    """Hold a call to the kernels of chosen groups, for all sequences or some of them."""

    tokens: Tokens
    cores: Cores
    spec: Spec
    mass: Tensor | None
    """Of the core tokens, [N, 1, M]."""
    choice: Choice

    def specialized(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return the arguments of every kernel for each of whose values Triton compiles another:
        `sizes` (k, queries of a share, that number rounded up to a power of 2), then `rule`."""
        share = self.choice.share
        sizes = (self.choice.groups.shape[2], share, power_of_2(share))
        return sizes, rule_of(self.spec)

    def factors(self) -> tuple[float, float]:
        """Return scale and softcap."""
        return float(self.spec.scale), float(self.spec.softcap or 1.0)

    @property
    def rows(self) -> int:
        """Rows of a share: queries, rounded up to a power of 2, of all heads of a KV head."""
        return self.tokens.q.shape[1] * power_of_2(self.choice.share)

    def constants(self, tiles: Tiles, rows: int) -> dict[str, Any]:
        """Return the constants of a kernel whose programs own at most `rows` rows."""
        r, _, dim = self.tokens.q.shape[1:]
        blocks = (max(16, power_of_2(dim)), max(16, min(tiles.block_m, power_of_2(rows))))
        form = RawForm(r, self.spec.softcap is not None, dim, *blocks, tiles.block_n)
        return {"FORM": form, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages}

    def chip(self) -> tuple[Chip, torch.dtype, int]:
        """Return the first arguments of the tables of tiles."""
        q = self.tokens.q
        return chip_of(q.device), q.dtype, q.shape[3]

    def marks(self) -> Marks:
        """Mark the core tokens of chosen groups, which no query of the share sees."""
        first = min(self.spec.sinks, self.tokens.k.shape[1])
        entries = first + self.cores.k.shape[2]
        return mark(self.choice.groups, self.choice.share, entries, first)

    def unions(self, marks: Marks) -> Unions:
        """Return the unions of neighbouring queries' groups, from the call's marks."""
        first = min(self.spec.sinks, self.tokens.k.shape[1])
        places = (self.tokens.q_start, self.tokens.q.shape[2], self.cores.k.shape[2])
        return unite(marks, first, places, self.choice.groups.shape[2], rule_of(self.spec))


def split(call: Call) -> list[tuple[slice, Call]]:
    """Split a call into slices of the sequences, whose marks fit into _MARK_BYTES."""
    tokens, cores, spec, mass, choice = call
    n, count = choice.groups.shape[:2]
    size = max(1, _MARK_BYTES // max(1, count * (spec.sinks + cores.k.shape[2]) // 8))
    if size >= n:
        return [(slice(n), call)]
    calls = []
    for low in range(0, n, size):
        sequences = slice(low, low + size)
        smaller = Call(
            Tokens(*(x[sequences] for x in tokens[:3]), tokens.q_start),
            Cores(*(x[sequences] for x in cores)),
            spec,
            None if mass is None else mass[sequences],
            choice.part(sequences),
        )
        calls.append((sequences, smaller))
    return calls


def together(results: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Concatenate the results of the calls of `split`; a result that is None stays None."""
    if len(results) == 1:
        return results[0]
    return tuple(None if x[0] is None else torch.cat(x) for x in zip(*results))


def attend_raw(call: Call, out: Tensor, lse: Tensor) -> None:
    """Attend to the raw tokens of chosen groups and merge with out [N, r, T, D] and the natural
    log-sum-exp lse [N, r, T], in place."""
    tokens, cores, _, _, choice = call
    q, k, v = map(contiguous_rows, tokens[:3])
    n, count, _ = choice.groups.shape
    constants = call.constants(fetch_tiles(*call.chip(), call.rows), call.rows)
    first_share = tokens.q_start // choice.share
    launch(
        fetch_fwd_kernel,
        (n * count * ceil_div(call.rows, constants["FORM"].block_m),),
        (
            *((q, k, v), choice.groups.contiguous(), (out, lse)),
            ints(q.shape[2], cores.k.shape[2], count, first_share, tokens.q_start),
            call.factors(),
        ),
        (tuple(x.stride()[:-1] for x in (q, k, v, out)), *call.specialized()),
        **constants,
    )


def add_raw_gradients(
    upstream: Upstream,
    call: Call,
    grads: tuple[Tensor, Tensor, Tensor],
    query_scale: float,
    add_query_gradient: Callable[..., None] | None = None,
) -> None:
    """Add the gradients through raw tokens of chosen groups to those of q, k and v, in place.

    Args:
        grads: That of q in float32; the others in float32 or their dtype.
        query_scale: Factor of the gradient of q: the scale, or 1 where the caller scales it later.
        add_query_gradient: Called instead of `_add_query_gradient`: Hopper has its own.
    """
    tokens, cores, spec, _, choice = call
    dq, dk, dv = grads
    q, k, v, grad_out = map(contiguous_rows, (*tokens[:3], upstream.grad_out))
    num_groups = cores.k.shape[2]
    if not (q.numel() and choice.groups.shape[2] and num_groups):
        return
    lse = upstream.lse.contiguous()
    delta = torch.empty_like(lse)
    (add_query_gradient or _add_query_gradient)(upstream, call, dq, delta, query_scale)
    order, begin = _shares_by_group(choice.groups, num_groups)
    tiles = fetch_dkv_tiles(*call.chip(), spec.group_size)
    constants = call.constants(tiles, spec.group_size)
    launch(
        fetch_dkv_kernel,
        (ceil_div(spec.group_size, constants["FORM"].block_m) * num_groups * q.shape[0],),
        (
            *((q, k, v), (lse, grad_out, delta), (order, begin), (dk, dv)),
            *(ints(q.shape[2], k.shape[1], num_groups, order.shape[1]), call.factors()),
        ),
        (tuple(x.stride()[:-1] for x in (q, k, v, grad_out)), *call.specialized()),
        **constants,
    )


def _add_query_gradient(
    upstream: Upstream, call: Call, dq: Tensor, delta: Tensor, query_scale: float
) -> None:
    """Add the gradient through raw tokens of chosen groups, times query_scale, to dq [N, r, T, D]
    in float32, in place; fill delta [N, r, T] = sum(out * grad out) - grad lse."""
    q, k, v, grad_out = map(contiguous_rows, (*call.tokens[:3], upstream.grad_out))
    lse = upstream.lse.contiguous()
    grad_lse = lse if upstream.grad_lse is None else upstream.grad_lse.contiguous()
    chosen = call.choice.groups.contiguous()
    n, count, _ = chosen.shape
    constants = call.constants(fetch_dq_tiles(*call.chip(), call.rows), call.rows)
    launch(
        fetch_dq_kernel,
        (n * count * ceil_div(call.rows, constants["FORM"].block_m),),
        (
            *((q, k, v), chosen, (upstream.out.contiguous(), lse, grad_out, grad_lse), (dq, delta)),
            *(ints(q.shape[2], call.cores.k.shape[2], count), (*call.factors(), query_scale)),
        ),
        (tuple(x.stride()[:-1] for x in (q, k, v, grad_out)), *call.specialized()),
        HAS_GRAD_LSE=upstream.grad_lse is not None,
        **constants,
    )


def _shares_by_group(chosen: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return where each group is chosen: places c k + i of choice i of share c, [N, C k], sorted by
    the chosen group (-1 last), and where those of each group begin, [N, M + 1]; both in int32."""
    flat = chosen.flatten(1)
    flat = torch.where(flat < 0, num_groups, flat)
    ordered, order = flat.sort(dim=1, stable=True)
    groups = torch.arange(num_groups + 1, dtype=torch.int32, device=chosen.device)
    begin = torch.searchsorted(ordered, groups.expand(chosen.shape[0], -1).contiguous())
    return order.to(torch.int32), begin.to(torch.int32)
