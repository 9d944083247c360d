"""Read and write entries of a cache buffer [B, Hkv, slots, D] by row and slot."""

from torch import Tensor


def read(buffer: Tensor, slots: Tensor) -> Tensor:
    """Return the entries [B, Hkv, n, D] of each row at its own slots [B, n]."""
    index = slots[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
    return buffer.gather(2, index)


def write(buffer: Tensor, slots: Tensor, x: Tensor) -> None:
    """Store entries [B, Hkv, n, D] of each row at its own slots [B, n], in place."""
    index = slots[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
    buffer.scatter_(2, index, x.to(buffer.dtype))


def ring_views(buffer: Tensor, rows: slice, start: int, stop: int, ring: int) -> list[Tensor]:
    """Return views of the entries of positions start .. stop - 1, at most `ring` of them, in a ring
    of the slots 0 .. ring - 1: one view, or two where the positions wrap.

    Views, because indexing by a tensor would copy the index to the device in every layer.
    """
    first = start % ring
    stop = first + stop - start
    if stop <= ring:
        return [buffer[rows, :, first:stop]]
    # mutant 4: a ring that wraps goes on behind its beginning
    return [buffer[rows, :, first:ring], buffer[rows, :, : stop - ring]]


def grown(buffer: Tensor, size: int) -> Tensor:
    """Return a copy with `size` slots, zero behind those of the buffer: uninitialized memory may
    hold NaN, which a mask does not remove (0 x NaN is NaN)."""
    larger = buffer.new_zeros(*buffer.shape[:2], size, buffer.shape[3])
    larger[:, :, : buffer.shape[2]] = buffer
    return larger
