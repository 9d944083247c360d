"""Compile the kernels that store, pool and gather the tokens of prompts, before there is one: it
would wait seconds for each."""

import torch
from torch import Tensor

from corecontext.ops.spec import Spec
from corecontext.ops.triton.paged.copy_tokens import copy_tokens
from corecontext.ops.triton.paged.gather import Span, gather_chunk
from corecontext.ops.triton.paged.group_slots import FarPages
from corecontext.ops.triton.paged.pages import Batch, IndexPages, Pages
from corecontext.ops.triton.paged.pool_pages import PoolPlan, pool_pages
from corecontext.ops.triton.paged.store_tokens import store_tokens


def compile_for_any_prompt(
    q: Tensor,
    new: tuple[Tensor, Tensor, Tensor],
    raw: Pages,
    cores: Pages,
    spec: Spec,
    index: IndexPages | None = None,
    far: FarPages | None = None,
) -> None:
    """Compile them by launches that read and write no page: for no sequence, then for one of a
    single token.

    Args:
        q, new: Of any step; new are keys, values and slots. Their dtypes and strides are compiled
            for, as those of the pages.
        raw, cores, index, far: As of `PoolPlan.of`.
    """
    q, k, v, slots = (x[:1] for x in (q, *new))
    starts = torch.zeros(2, dtype=torch.int32, device=q.device)
    plan = PoolPlan.of(raw, cores, spec, q.shape[1], index, far)
    none = Batch(starts, starts[:1], 1, 1)
    pool_pages(q, (k, v, slots), none, (raw.table, cores.table), plan)
    pages, kept = far or FarPages(raw)
    if far is not None:
        nowhere = torch.full_like(slots, -1)
        store_tokens(k, v, nowhere, pages)
        copy_tokens([(raw, pages)], nowhere, nowhere)
    gather_chunk((k, v), Span.of(0, 1, spec), pages, cores, spec, kept)
