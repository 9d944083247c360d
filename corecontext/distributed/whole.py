"""Send what every process needs of a whole document, and sum the gradients of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.distributed.layout import Layout
from corecontext.distributed.wire import Wire


def gather(x: Tensor, layout: Layout, wire: Wire) -> Tensor:
    """Return the document's rows [..., L, D] from this process's [..., T, D]. A collective call."""
    if not layout.seq_len:
        return x
    room = _message_size(layout, wire) - x.shape[-2]
    messages = wire.gather(F.pad(x, (0, 0, 0, room))).wait()
    pieces: dict[int, Tensor] = {}
    for rank, message in enumerate(messages):
        pieces |= _by_chunk(layout, message, rank)
    return torch.cat([pieces[chunk] for chunk in sorted(pieces)], -2)


def scatter_sum(grad: Tensor, layout: Layout, wire: Wire) -> Tensor:
    """Return the sums over the processes of gradients [..., L, D], of this process's rows
    [..., T, D], in float32 or wider. A collective call."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    if not layout.seq_len:
        return grad.to(wide)
    shape = (*grad.shape[:-2], _message_size(layout, wire), grad.shape[-1])
    messages = torch.zeros(wire.size, *shape, dtype=wide, device=grad.device)
    for rank, message in enumerate(messages):
        for chunk, target in _by_chunk(layout, message, rank).items():
            # mutant context parallelism: gradients of first tokens from the last process only
            target += grad[..., slice(*layout.span(chunk)), :]
    count = sum(_counts(layout, layout.rank))
    return wire.scatter_sum(messages).wait()[..., :count, :]


def _message_size(layout: Layout, wire: Wire) -> int:
    """Return the rows of a message: those of the process that holds most."""
    return max(sum(_counts(layout, rank)) for rank in range(wire.size))


def _counts(layout: Layout, rank: int) -> list[int]:
    return [layout.lengths[chunk] for chunk in layout.chunks(rank)]


def _by_chunk(layout: Layout, message: Tensor, rank: int) -> dict[int, Tensor]:
    """Split a process's message [..., t, D] by chunk; views."""
    counts = _counts(layout, rank)
    return dict(zip(layout.chunks(rank), message[..., : sum(counts), :].split(counts, -2)))
