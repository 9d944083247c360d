"""Hold the arguments of the kernels that attend to the raw tokens of chosen groups."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.ops.fetch.choice import Choice
from corecontext.ops.spec import Cores, Spec, Tokens
from corecontext.ops.triton.attend.anywhere import rule_of
from corecontext.ops.triton.attend.marks import Marks, mark
from corecontext.ops.triton.launch import power_of_2
from corecontext.ops.triton.tiles import Chip, Tiles, chip_of

_MARK_BYTES = 256 << 20  # marks in memory at a time, of some KV heads


class Call(NamedTuple):
    """Hold a call to the kernels of chosen groups for some sequences of KV heads."""

    tokens: Tokens
    cores: Cores
    spec: Spec
    core_bias: Tensor | None
    choice: Choice

    def specialized(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return the last arguments of every kernel, `sizes` and `rule`."""
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

    def constants(self, tiles: Tiles, rows: int) -> dict[str, int | bool]:
        """Return what a kernel is compiled for whose tiles have at most `rows` rows."""
        r, _, dim = self.tokens.q.shape[1:]
        return {
            "HEADS": r,
            "HAS_SOFTCAP": self.spec.softcap is not None,
            "HEAD_DIM": dim,
            "BLOCK_D": max(16, power_of_2(dim)),
            "BLOCK_M": max(16, min(tiles.block_m, power_of_2(rows))),
            "BLOCK_N": tiles.block_n,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }

    def chip(self) -> tuple[Chip, torch.dtype, int]:
        """Return the first arguments of the tables of tiles."""
        q = self.tokens.q
        return chip_of(q.device), q.dtype, q.shape[3]

    def marks(self) -> Marks:
        """Mark the core tokens that no query of a share sees."""
        tokens = self.tokens
        cores = self.cores
        spec = self.spec
        first = min(spec.sinks, tokens.k.shape[1])
        entries = first + cores.k.shape[2]
        return mark(self.choice.groups, self.choice.share, entries, first)


def split(call: Call) -> list[tuple[slice, Call]]:
    """Return the call for some sequences at a time, whose marks fit into their memory."""
    tokens, cores, spec, core_bias, choice = call
    n, count = choice.groups.shape[:2]
    size = max(1, _MARK_BYTES // max(1, count * (spec.sinks + cores.k.shape[2]) // 8))
    if size >= n:
        return [(slice(n), call)]
    calls = []
    for low in range(0, n, size):
        heads = slice(low, low + size)
        smaller = Call(
            Tokens(*(x[heads] for x in tokens[:3]), tokens.q_start),
            Cores(*(x[heads] for x in cores)),
            spec,
            None if core_bias is None else core_bias[heads],
            choice.part(heads),
        )
        calls.append((heads, smaller))
    return calls


def together(results: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Concatenate the results of parts."""
    if len(results) == 1:
        return results[0]
    return tuple(None if x[0] is None else torch.cat(x) for x in zip(*results))
