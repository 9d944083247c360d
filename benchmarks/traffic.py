"""Count the bytes that one attention layer moves between processes, in closed form: context
parallelism, and ring attention."""

from itertools import pairwise
from typing import NamedTuple

from corecontext.distributed.halo import Shape
from corecontext.distributed.layout import Layout
from corecontext.ops.spec import Spec
from corecontext.visibility import num_complete_groups


class Traffic(NamedTuple):
    """Hold the bytes that one process receives in one layer."""

    forward_bytes: int
    backward_bytes: int

    @property
    def total_bytes(self) -> int:
        """Forward and backward."""
        return self.forward_bytes + self.backward_bytes


def context_parallel_traffic(
    layout: Layout, num_processes: int, spec: Spec, shape: Shape, item_bytes: int = 2
) -> Traffic:
    """Return the bytes that `layout.rank` receives: the others' core tokens and first tokens kept
    raw, and its halos, the raw tokens of others that its queries see.

    Forward: keys, values and group-end queries, `item_bytes` an element, and masses in float32.
    Backward: gradients of the same elements in float32, from all others for its core tokens, and
    from the receivers of its raw tokens for these. With fetch, all keys, values and group-end
    queries of the others, backward again, and gradients of as many elements.
    """
    g = spec.group_size
    assert isinstance(g, int)  # heads of another size are counted by another call
    batch_size, num_heads, num_kv_heads, head_dim = shape
    if spec.fetch_groups and g > 1:
        # Every rank's share is padded to the largest.
        edges = [num_complete_groups(start - spec.sinks, g) for start in layout.starts]
        ends = Layout(tuple(b - a for a, b in pairwise(edges)), layout.owners, layout.rank)
        vectors = 2 * num_kv_heads * _largest_share(layout, num_processes)
        vectors += num_heads * _largest_share(ends, num_processes)
        elements = (num_processes - 1) * batch_size * head_dim * vectors
        return Traffic(elements * item_bytes, elements * (item_bytes + max(4, item_bytes)))
    # First tokens: every rank's share is padded to the largest. The others are a sequence of their
    # own.
    sinks = min(spec.sinks, layout.seq_len)
    among = layout.clip(0, sinks)
    share = _largest_share(among, num_processes)
    first = (num_processes - 1) * 2 * batch_size * num_kv_heads * share * head_dim
    layout = layout.clip(sinks, layout.seq_len)
    # Halos: tokens go forward to the rank that sees them, gradients back to the rank that holds
    # them.
    forward_elements = 0
    backward_elements = 0
    for source, target, low, high in layout.messages(g, spec.window_size):
        holder = layout.owners[source]
        receiver = layout.owners[target]
        if holder == receiver:
            continue
        group_ends = high // g - low // g
        vectors = 2 * num_kv_heads * (high - low) + num_heads * group_ends
        elements = batch_size * head_dim * vectors
        forward_elements += elements * (receiver == layout.rank)
        backward_elements += elements * (holder == layout.rank)
    # Core tokens: every rank's share is padded to the largest.
    groups = layout.groups(g)
    made = [sum(groups.lengths[i] for i in groups.chunks(rank)) for rank in range(num_processes)]
    cores = (num_processes - 1) * 2 * batch_size * num_kv_heads * max(made) * head_dim
    wide_bytes = max(4, item_bytes)
    mass_bytes = 0
    if spec.core_mass and g > 1:
        mass_bytes = (num_processes - 1) * batch_size * num_kv_heads * max(made) * wide_bytes
    return Traffic(
        (first + cores + forward_elements) * item_bytes + mass_bytes,
        (first + cores + backward_elements) * wide_bytes + mass_bytes,
    )


def _largest_share(layout: Layout, num_processes: int) -> int:
    """Return the tokens of the rank that holds most."""
    ranks = range(num_processes)
    return max(sum(layout.lengths[i] for i in layout.chunks(rank)) for rank in ranks)


def ring_traffic(
    seq_len: int,
    num_processes: int,
    *,
    batch_size: int,
    num_kv_heads: int,
    head_dim: int,
    item_bytes: int = 2,
) -> Traffic:
    """Return the bytes that each process of ring attention receives: the others' keys and values
    forward; backward these again, and their gradients in float32, on their way around."""
    tokens = (num_processes - 1) * -(-seq_len // num_processes)
    elements = 2 * tokens * batch_size * num_kv_heads * head_dim
    return Traffic(elements * item_bytes, elements * (item_bytes + max(4, item_bytes)))
