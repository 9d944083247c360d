"""Count the groups and bytes of fetch's indices, by their names."""

from __future__ import annotations

from corecontext.config import parse_index
from corecontext.visibility import num_complete_groups

MOST_CENTRED = 512
"""Most tokens whose mean key centres keys in low bits."""


def num_parts(name: str, group_size: int) -> int:
    """Count the keys of a group that an index has: P."""
    kind, parts, _ = parse_index(name)
    if kind == "parts":
        return min(parts, group_size)
    return {"pairs": -(-group_size // 2), "bits": group_size, "oracle": group_size}.get(kind, 1)


def index_bytes(name: str, group_size: int, head_dim: int, itemsize: int) -> int:
    """Count the bytes that an index stores for a group and KV head, keys having `itemsize` bytes an
    element; those of "oracle" are the raw keys themselves."""
    kind, _, bits = parse_index(name)
    parts = num_parts(name, group_size)
    if bits:
        num_scales = parts if kind == "bits" else 1
        return parts * -(-head_dim * bits // 8) + 2 * num_scales
    return parts * head_dim * itemsize


def stored_index_bytes(name: str, group_size: int, head_dim: int, itemsize: int) -> int:
    """Count the bytes that a cache stores for a group beside its raw tokens."""
    if name == "oracle":
        return 0
    return index_bytes(name, group_size, head_dim, itemsize)


def num_centred(name: str, group_size: int, window_size: int) -> int:
    """Count the tokens, after the first tokens kept raw, whose mean key centres an index in low
    bits: whole groups, and at most the window, so that each query that sees a group is behind
    them."""
    if not parse_index(name).bits:
        return 0
    # mutant fetch: keys are centred by tokens to come
    return min(MOST_CENTRED, window_size) // group_size * group_size


def index_lag(name: str, group_size: int, window_size: int) -> int:
    """Count the tokens between a group's last and the one that makes its index: a group less than
    the centre counts, so that no query sees a group whose index is younger than a step."""
    return max(0, num_centred(name, group_size, window_size) - group_size)


def num_indexed(name: str, seq_len: int, group_size: int, window_size: int) -> int:
    """Count the groups that have an index after seq_len tokens behind those kept raw: in low bits
    they wait for the tokens that centre them, as no query sees a group that is younger."""
    lag = index_lag(name, group_size, window_size)
    return num_complete_groups(seq_len - lag, group_size)
