"""Bytes that one attention layer moves between processes, in closed form: context parallelism, and
ring attention."""

from __future__ import annotations

from typing import NamedTuple

from corecontext.distributed.layout import Layout


class Traffic(NamedTuple):
    """What one process receives in one layer."""

    forward_bytes: int
    backward_bytes: int

    @property
    def total_bytes(self) -> int:
        """Forward and backward."""
        return self.forward_bytes + self.backward_bytes


def context_parallel_traffic(
    layout: Layout,
    num_processes: int,
    *,
    group_size: int,
    window_size: int,
    batch_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    core_heads: str = "kv",
    item_bytes: int = 2,
) -> Traffic:
    """Bytes that `layout.rank` receives: core tokens of all others, and what it sees raw of others'
    tokens.

    Forward keys, values and group-end queries come in their own dtype, `item_bytes` each. Backward
    the same elements' gradients come in float32: those of its own core tokens from all others,
    those of others' halos from these.
    """
    owners, rank = layout.owners, layout.rank

    def halo(came_to: bool) -> int:
        elements = 0
        for source, target, low, high in layout.messages(group_size, window_size):
            if owners[source] != owners[target] and owners[target if came_to else source] == rank:
                ends = high // group_size - low // group_size
                elements += (
                    batch_size * head_dim * (2 * num_kv_heads * (high - low) + num_heads * ends)
                )
        return elements

    made = [
        sum(b - a for a, b in (layout.groups(i, group_size) for i in layout.chunks(r)))
        for r in range(num_processes)
    ]
    heads = num_heads if core_heads == "query" else num_kv_heads
    cores = (num_processes - 1) * 2 * batch_size * heads * max(made) * head_dim
    return Traffic((cores + halo(True)) * item_bytes, (cores + halo(False)) * max(4, item_bytes))


def ring_traffic(
    seq_len: int,
    num_processes: int,
    *,
    batch_size: int,
    num_kv_heads: int,
    head_dim: int,
    item_bytes: int = 2,
) -> Traffic:
    """Bytes that each process of ring attention receives: everybody's keys and values forward;
    backward these again, and their gradients in float32, on their way around."""
    elements = (
        (num_processes - 1)
        * 2
        * batch_size
        * num_kv_heads
        * -(-seq_len // num_processes)
        * head_dim
    )
    return Traffic(elements * item_bytes, elements * (item_bytes + max(4, item_bytes)))
