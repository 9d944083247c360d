"""Score groups by index keys: for each share of queries the parts that groups have of the softmax
over all index scores of its far past, summed over the query heads of a KV head.

Two kernels read the index keys, one for each row's log-sum-exp, one for the scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.ops.triton.attend.shares import Choosing
from corecontext.ops.triton.choose.score_kernels import group_scores_kernel, index_lse_kernel
from corecontext.ops.triton.launch import ceil_div, ints, launch, power_of_2
from corecontext.ops.triton.tiles import chip_of, choose_tiles

_HEADS = 4  # query heads whose queries one program holds
_SEGMENT = 1024  # groups that one program scores
RUN = 16  # neighbouring groups of a run


class Queries(NamedTuple):
    """Hold the queries of a choice, the index and the settings; shapes as in `choose`."""

    q: Tensor
    index: Tensor
    settings: Choosing

    def head_blocks(self) -> list[tuple[int, int]]:
        """Return the first head and the number of heads of each launch."""
        r = self.q.shape[1]
        return [(first, min(_HEADS, r - first)) for first in range(0, r, _HEADS)]

    def positions(self) -> tuple[int, int, int]:
        """Return the number of groups, the first share's number and the end of the queries."""
        return self.index.shape[1], self.settings.first_share, self.settings.q_end

    def factors(self) -> tuple[float, float]:
        """Return scale and softcap."""
        return float(self.settings.scale), float(self.settings.softcap or 1.0)

    def specialized(self) -> tuple:
        """Return the arguments for whose values the kernels that score are compiled."""
        n, r = self.q.shape[:2]
        strides = (self.q.stride()[:-1], self.index.stride()[:-1])
        return strides, (n, r), self.settings.share, self.settings.rule

    def constants(self, heads: int) -> dict[str, int | bool]:
        """Return the constants of the kernels that score."""
        dim = self.q.shape[3]
        tiles = choose_tiles(chip_of(self.q.device), self.q.dtype, dim)
        return {
            "HEADS": heads,
            "KEYS": self.index.shape[2],
            "HEAD_DIM": dim,
            "BLOCK_D": max(16, power_of_2(dim)),
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }


def log_sums(call: Queries) -> Tensor:
    """Return the log-sum-exp of each row's index scores, [N, r, C], in units of log 2."""
    q, index, settings = call
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for first_head, heads in call.head_blocks():
        constants = call.constants(heads)
        launch(
            index_lse_kernel,
            (ceil_div(q.shape[2], constants["BLOCK_M"]) * q.shape[0],),
            (q, index, lse, ints(q.shape[2], *call.positions(), first_head), *call.factors()),
            call.specialized(),
            HAS_SOFTCAP=settings.softcap is not None,
            **constants,
        )
    return lse


def score_groups(
    call: Queries, lse: Tensor, scores: Tensor, first_row: int, best: Tensor | None = None
) -> None:
    """Fill the scores [N, rows, groups] of the shares from first_row on.

    Args:
        best: [N, rows, groups / RUN], filled with the largest score of each run of groups.
    """
    q, index, settings = call
    rows, width = scores.shape[1:]
    for first_head, heads in call.head_blocks():
        constants = call.constants(heads)
        tiles = ceil_div(rows, constants["BLOCK_M"]) * q.shape[0]
        launch(
            group_scores_kernel,
            (tiles, ceil_div(width, _SEGMENT)),
            (
                *(q, index, lse),
                *(scores, scores if best is None else best),
                ints(q.shape[2], *call.positions(), first_head, first_row, rows, width),
                *call.factors(),
            ),
            call.specialized(),
            HAS_SOFTCAP=settings.softcap is not None,
            ADD=first_head > 0,
            SEGMENT=_SEGMENT,
            RUN=RUN if best is not None and first_head + heads == q.shape[1] else 0,
            **constants,
        )
