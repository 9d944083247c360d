"""CCA attention on one sequence that lies in contiguous chunks on several processes.

Per layer a process receives the core tokens of all others, L / g, and the few raw tokens before its
chunks: about 1 / g of ring attention's keys and values (traffic.py counts both). parts.py has the
computation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corecontext.config import CCAConfig
from corecontext.distributed.attention import Call, attend
from corecontext.distributed.halo import Halo
from corecontext.distributed.kept import Keeper
from corecontext.distributed.layout import Layout
from corecontext.distributed.own_rules import attend as attend_by_rule
from corecontext.distributed.wire import Wire
from corecontext.ops import rules
from corecontext.ops.api import backend_module, cca_attention, choose_backend, outside_autocast
from corecontext.ops.head_split import check_sizes, deal, deal_learned, heads_of_each, put_back
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Spec, check_rotary
from corecontext.visibility import group_size_for


@dataclass(frozen=True)
class Shard:
    """One process's share of a sequence: how the sequence lies, by what the processes talk, where
    documents begin."""

    wire: Wire
    layout: Layout
    documents: tuple[int, ...] = ()
    """Boundaries 0, ..., L of documents packed in the sequence, which do not see each other; () for
    one document."""
    keeper: Keeper | None = None
    """Where given, collects what compact caches need of the sequence."""

    def __post_init__(self) -> None:
        edges = self.documents
        if self.layout.rank != self.wire.rank or max(self.layout.owners) >= self.wire.size:
            raise ValueError(
                f"layout must be of process {self.wire.rank} of {self.wire.size}, got rank "
                f"{self.layout.rank} and owners {self.layout.owners}."
            )
        rising = all(a < b for a, b in zip(edges, edges[1:]))
        if edges and not (rising and edges[0] == 0 and edges[-1] == self.layout.seq_len):
            raise ValueError(
                f"documents must rise from 0 to the length {self.layout.seq_len}, got {edges[:8]}."
            )
        if self.keeper is not None and (edges or not self.layout.is_shared):
            raise ValueError(
                "keeper must be None where documents are packed, or one process holds the whole sequence."
            )


@torch.compiler.disable  # the exchanges are Python
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: Shard,
    *,
    group_size: int | Sequence[int] = 16,
    window_size: int = 1024,
    num_groups: int | None = None,
    pooling: str = "cca",
    core_position: str = "middle",
    core_heads: str = "kv",
    rotary: Rotary | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    core_bias: float = 0.0,
    learned: Mapping[str, Tensor] | None = None,
    sink_size: int = 0,
    backend: str = "auto",
) -> Tensor:
    """`cca_attention` of the whole sequence, for the tokens of this process. A collective call.

    Args:
        q: Queries of this process's tokens, [B, H, T, D], rotary applied at their positions in
            their document.
        k, v: Keys (rotary applied) and values of the same tokens, [B, Hkv, T, D].
        shard: How the sequence lies; T is the layout's share of this process.
        core_bias: A number added to the scores of core tokens.
        learned: As in `cca_attention`, the same on every process.
        sink_size: Must be 0: first tokens kept raw are not sent around.
        Others: As in `cca_attention`, the same on every process.

    Returns:
        [B, H, T, D] in the dtype of q; differentiable in q, k and v, whose gradients are those of
        the sum of all processes' losses, so every process must call backward. In `learned`
        gradients are this process's share, to be summed over the processes as those of any weight.

    Raises:
        ValueError: a setting breaks a rule, or the layout does not fit the inputs.
        NotImplementedError: sink_size; backend="reference", which has no backward in parts.
    """
    if isinstance(group_size, (tuple, list)):
        kv_heads = len(check_sizes(group_size, k.shape[1], num_groups))
        sizes, parts = heads_of_each(group_size)
        return put_back(
            [
                context_parallel_attention(
                    *tensors,
                    shard,
                    group_size=g,
                    window_size=window_size,
                    pooling=pooling,
                    core_position=core_position,
                    core_heads=core_heads,
                    rotary=rotary,
                    scale=scale,
                    softcap=softcap,
                    core_bias=core_bias,
                    learned=own,
                    sink_size=sink_size,
                    backend=backend,
                )
                for g, own, *tensors in zip(
                    sizes,
                    deal_learned(learned or {}, parts, kv_heads),
                    *(deal(x, parts, kv_heads) for x in (q, k, v)),
                )
            ],
            parts,
        )
    CCAConfig(
        group_size,
        window_size,
        num_groups,
        pooling,
        core_position,
        core_heads,
        core_bias,
        sink_size=sink_size,
    )  # validates
    if sink_size:
        raise NotImplementedError(
            f"sink_size must be 0 in context parallelism, got {sink_size}. Use one process."
        )
    layout, same = shard.layout, {"pooling": pooling, "core_heads": core_heads, "softcap": softcap}
    count = sum(layout.lengths[i] for i in layout.chunks())
    if q.shape[2] != count or k.shape[2] != count:
        raise ValueError(
            f"q and k must hold the {count} tokens that the layout gives process {layout.rank}, got "
            f"{q.shape[2]} and {k.shape[2]}."
        )
    if core_position == "middle" and rotary is None:
        raise ValueError(
            "rotary must be given for core_position='middle', got None. "
            "Pass rotary=Rotary.from_theta(theta, head_dim), or core_position='token'."
        )
    (q, k, v), context = outside_autocast(q, k, v)
    if choose_backend(backend, q) == "reference":
        raise NotImplementedError(
            "backend 'reference' cannot run context parallelism. Use backend='packed'."
        )
    if learned:
        rules.check(learned, q.shape[1], k.shape[1], q.shape[3])
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    with context:

        def one(layout: Layout, tokens: Sequence[Tensor]) -> Tensor:
            size = (
                group_size_for(layout.seq_len, window_size, num_groups)
                if num_groups
                else group_size
            )
            if not layout.is_shared:
                return cca_attention(
                    *tokens,
                    group_size=size,
                    window_size=window_size,
                    core_position=core_position,
                    rotary=rotary,
                    scale=scale,
                    core_bias=core_bias,
                    learned=learned,
                    backend=backend,
                    **same,
                )
            spec = Spec(
                group_size=size,
                window_size=window_size,
                scale=scale,
                rotary=check_rotary(rotary, core_position),
                **same,
            )
            halo = Halo(
                shard.wire,
                layout,
                size,
                window_size,
                q.shape[0],
                q.shape[1],
                k.shape[1],
                q.shape[3],
            )
            keep = shard.keeper and functools.partial(shard.keeper.keep, halo, rotary, *tokens[1:])
            call = Call(halo, backend_module(backend, tokens[0]), float(core_bias), spec, keep)
            if learned or pooling == "mean_query":
                return attend_by_rule(*tokens, call, learned or {})
            return attend(*tokens, call)

        if len(shard.documents) <= 2:
            return one(layout, (q, k, v))
        return _by_document(shard, (q, k, v), one)


def _by_document(shard: Shard, tokens: Sequence[Tensor], one: Any) -> Tensor:
    """Each document by itself; all processes meet at those that several of them hold."""
    layout, pieces = shard.layout, []
    for start, end in zip(shard.documents, shard.documents[1:]):
        part = layout.part_of(start, end)
        mine, offsets, offset = part.chunks(), {}, 0
        for chunk in layout.chunks():  # where each chunk begins in this process's tensors
            offsets[chunk] = offset + max(0, start - layout.starts[chunk])
            offset += layout.lengths[chunk]
        if not mine and not part.is_shared:
            continue
        slices = [slice(offsets[i], offsets[i] + part.lengths[i]) for i in mine] or [slice(0, 0)]
        out = one(part, [torch.cat([x[:, :, s] for s in slices], 2) for x in tokens])
        for s, piece in zip(slices, out.split([s.stop - s.start for s in slices], 2)):
            pieces.append((s.start, piece))
    if not pieces:  # this process has no token, and no document that several have
        q, k, v = tokens
        return q + (k.sum() + v.sum())
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda one: one[0])], 2)
