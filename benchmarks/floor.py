"""Count the operations and bytes that no implementation can avoid, and the shortest time they take.

The operations are those of `corecontext/cost.py`.
"""

from corecontext.cost import ModelCost, operator_flops
from corecontext.visibility import local_start, num_far_entries, num_visible_cores


def pass_flops(pass_name: str, *sizes: int, batch: int = 1, **options: int) -> int:
    """Count operations of "forward", "backward" or "forward_backward"; other arguments are those of
    `operator_flops`."""
    flops = 0
    for name, backward in (("forward", False), ("backward", True)):
        if name in pass_name:
            flops += operator_flops(*sizes, **options, backward=backward)
    return batch * flops


def operator_bytes(
    seq_len: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    *,
    batch: int = 1,
    backward: bool = False,
) -> int:
    """Count the bytes that must move at least: q, k and v are read and out is written once; the
    backward pass moves dout, dq, dk and dv too."""
    forward = batch * seq_len * head_dim * itemsize * (2 * query_heads + 2 * kv_heads)
    return 2 * forward if backward else forward


def decode_bytes(
    position: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    *,
    group_size: int = 1,
    window_size: int = 1,
    sinks: int = 0,
    batch: int = 1,
) -> int:
    """Count bytes of the keys and values that the query at `position` sees: a decoding step of one
    layer reads them."""
    cores = num_visible_cores(position, group_size, window_size)
    near = position + 1 - local_start(position, group_size, window_size)
    entries = num_far_entries(cores, group_size, sinks) + near
    return 2 * batch * kv_heads * head_dim * itemsize * entries


def step_bytes(
    model: ModelCost,
    seq_len: int,
    group_size: int = 1,
    window_size: int = 1,
    *,
    batch: int = 1,
    cache_itemsize: float | None = None,
) -> float:
    """Count the bytes that a decoding step after seq_len tokens reads at least: all weights
    once, and the keys and values that it sees.

    Args:
        cache_itemsize: Bytes of a cached number, scales included, where it is not that of the
            weights.
    """
    itemsize = model.itemsize if cache_itemsize is None else cache_itemsize
    sizes = (model.kv_heads, model.head_dim, 1)
    seen = model.num_layers * decode_bytes(
        seq_len, *sizes, group_size=group_size, window_size=window_size, batch=batch
    )
    for window in model.windows:
        seen += decode_bytes(min(seq_len, window - 1), *sizes, batch=batch)
    return model.weight_bytes() + itemsize * seen


def floor_seconds(
    flops: float, flops_per_s: float, num_bytes: float = 0, bytes_per_s: float = float("inf")
) -> float:
    """Return the shortest possible time: all operations at the machine's matmul rate, or all bytes
    at its memory rate."""
    return max(flops / flops_per_s, num_bytes / bytes_per_s)
