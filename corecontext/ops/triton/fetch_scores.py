"""Score groups by index keys: for each share of queries and each query head the parts that groups
have of the softmax over all index scores of its far past, up to a factor of the row.

One kernel reads the index keys once; whoever reads the masses divides them by their sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.ops.capability import nvidia_capability
from corecontext.ops.triton.fetch_rule import Choosing
from corecontext.ops.triton.fetch_score_kernels import group_masses_kernel
from corecontext.ops.triton.launch import ceil_div, launch, power_of_2
from corecontext.ops.triton.tiles import chip_of, choose_tiles

RUN = 16  # neighbouring groups of a run


class Queries(NamedTuple):
    """Hold the queries of a choice, the index and the settings; shapes as in `choose`."""

    q: Tensor
    index: Tensor
    bias: Tensor | None
    settings: Choosing

    def positions(self) -> tuple[int, int, int]:
        """Return the number of groups, the first share's number and the end of the queries."""
        return self.index.shape[1], self.settings.first_share, self.settings.q_end


class Masses(NamedTuple):
    """Hold the masses of groups for some shares, from the share `first_row` of a call on."""

    groups: Tensor
    """[N, r, rows, groups]; undefined where a share does not see a group."""
    sums: Tensor
    """Over the groups that are seen, [N, r, rows] in float32."""
    first_row: int


def group_masses(call: Queries, first_row: int, rows: int, runs: int) -> Masses:
    """Return the masses of `runs` runs of groups, at least of those that the shares see."""
    q, index, bias, settings = call
    n, r, _, dim = q.shape
    masses = torch.empty((n, r, rows, runs * RUN), dtype=mass_dtype(q), device=q.device)
    sums = torch.empty((n, r, rows), dtype=torch.float32, device=q.device)
    tiles = choose_tiles(chip_of(q.device), q.dtype, dim)
    launch(
        group_masses_kernel,
        (ceil_div(rows, tiles.block_m) * n * r,),
        (
            *(q, index, sums if bias is None else bias, masses, sums),
            *(*call.positions(), first_row, rows, runs),
            *(float(settings.scale), float(settings.softcap or 1.0)),
        ),
        (q.stride()[:-1], n * r, r, settings.share, *settings.rule),
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=settings.softcap is not None,
        RUN=RUN,
        KEYS=index.shape[2],
        HEAD_DIM=dim,
        BLOCK_D=max(16, power_of_2(dim)),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        # Two programs of 8 warps then share a multiprocessor, which one leaves waiting.
        maxnreg=128 if tiles.num_warps == 8 and nvidia_capability(q.device) else None,
    )
    return Masses(masses, sums, first_row)


def mass_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of masses: of 16 bits for such queries, with the range of float32."""
    return torch.float32 if q.dtype == torch.float32 else torch.bfloat16
