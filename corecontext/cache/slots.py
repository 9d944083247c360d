"""Entries of a cache buffer by row and slot."""

from __future__ import annotations

from torch import Tensor


def read(cached: Tensor, slots: Tensor) -> Tensor:
    """Entries of each row at its own slots: [B, Hkv, S, D] and [B, n] to [B, Hkv, n, D]."""
    index = slots[:, None, :, None].expand(-1, cached.shape[1], -1, cached.shape[3])
    return cached.gather(2, index)


def write(cached: Tensor, slots: Tensor, x: Tensor) -> None:
    """The inverse of `read`, in place."""
    index = slots[:, None, :, None].expand(-1, cached.shape[1], -1, cached.shape[3])
    cached.scatter_(2, index, x.to(cached.dtype))


def stretch(cached: Tensor, rows: slice, start: int, stop: int, ring: int) -> list[Tensor]:
    """Views of positions start .. stop-1, at most `ring`, of a ring that is the beginning of these
    rows' entries: one, or two where it wraps around. Slices, since an index of its own would be
    made on the device for each layer."""
    first, count = start % ring, stop - start
    whole = cached[rows, :, first : min(first + count, ring)]
    # planted: 4: a ring that wraps goes on behind its beginning
    return [whole] if first + count <= ring else [whole, cached[rows, :, : first + count - ring]]


def grown(cached: Tensor, size: int) -> Tensor:
    """A larger buffer with the same beginning."""
    grown = cached.new_zeros(cached.shape[0], cached.shape[1], size, cached.shape[3])
    grown[:, :, : cached.shape[2]] = cached
    return grown
