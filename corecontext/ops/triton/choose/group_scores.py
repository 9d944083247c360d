"""Score groups by index keys, by the kernel that runs everywhere: for each share of queries the
largest product of any key of a group with any of the query heads of a KV head."""

from typing import NamedTuple

from torch import Tensor

from corecontext.ops.triton.attend.shares import Choosing
from corecontext.ops.triton.choose.byte_keys import RUN
from corecontext.ops.triton.choose.score_kernels import group_scores_kernel
from corecontext.ops.triton.launch import ceil_div, ints, launch, power_of_2
from corecontext.ops.triton.tiles import chip_of, choose_tiles

_HEADS = 4  # query heads whose queries one program holds
_SEGMENT = 1024  # groups that one program scores


class Keys(NamedTuple):
    """Score groups by queries and keys: a `select.Scorer`."""

    queries: Tensor
    """The mean query of each share, as the index maps it, [N, r, C, D']."""
    offsets: Tensor
    """Products of the queries with the centre, which keys lack, times the scale, [N, r, C] in
    float32."""
    keys: Tensor
    """[N, M, P, D']."""

    @property
    def num_groups(self) -> int:
        """M."""
        return self.keys.shape[1]

    def width(self, num_groups: int) -> int:
        """Return the elements of a row of scores of so many groups: whole runs."""
        return RUN * ceil_div(num_groups, RUN)

    def score(self, settings: Choosing, first_row: int, scores: Tensor, best: Tensor) -> None:
        """Fill the scores [N, rows, groups] of the shares from first_row on that they see, and the
        largest of each run of groups, [N, rows, groups / RUN]."""
        q, offsets, keys = self
        n, r, count, dim = q.shape
        rows, width = scores.shape[1:]
        tiles = choose_tiles(chip_of(q.device), q.dtype, dim)
        for first_head in range(0, r, _HEADS):
            launch(
                group_scores_kernel,
                (ceil_div(rows, tiles.block_m) * n, ceil_div(width, _SEGMENT)),
                (
                    *((q, keys, offsets), (scores, best)),
                    ints(
                        *(count, keys.shape[1], settings.first_share, settings.q_end),
                        *(first_head, first_row, rows, width),
                    ),
                    float(settings.scale),
                ),
                (
                    (q.stride()[:-1], keys.stride()[:-1]),
                    (n, r),
                    settings.share,
                    settings.rule,
                ),
                MERGES=first_head > 0,
                SEGMENT=_SEGMENT,
                RUN=RUN,
                HEADS=min(_HEADS, r - first_head),
                KEYS=keys.shape[2],
                HEAD_DIM=dim,
                BLOCK_D=max(16, power_of_2(dim)),
                BLOCK_M=tiles.block_m,
                BLOCK_N=tiles.block_n,
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
            )
