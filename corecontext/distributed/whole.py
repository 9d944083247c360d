"""Send what every process needs of a whole document (tokens, core tokens, masses), and sum the
gradients of it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.distributed.layout import Layout
from corecontext.distributed.wire import Wire


def gather(x: Tensor, layout: Layout, wire: Wire) -> Callable[[], Tensor]:
    """Start to collect the document's rows [..., L, D] from each process's [..., T, D]: a row is of
    a token, or of a core token under a layout of groups. A collective call.

    Returns:
        A function that waits for the rows and returns them.
    """
    if not layout.seq_len:
        return lambda: x
    padding = _message_size(layout, wire) - x.shape[-2]
    gathering = wire.gather(F.pad(x, (0, 0, 0, padding)))

    def wait() -> Tensor:
        pieces: dict[int, Tensor] = {}
        for rank, message in enumerate(gathering.wait()):
            pieces |= by_chunk(layout, message, rank)
        return torch.cat([pieces[chunk] for chunk in sorted(pieces)], -2)

    return wait


def scatter_sum(grad: Tensor, layout: Layout, wire: Wire) -> Callable[[], Tensor]:
    """Start to sum gradients [..., L, D] of all processes, in float32 or wider. A collective call.

    Returns:
        A function that waits for the sums of this process's rows [..., T, D].
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    if not layout.seq_len:
        return lambda: grad.to(wide)
    shape = (*grad.shape[:-2], _message_size(layout, wire), grad.shape[-1])
    messages = torch.zeros(wire.size, *shape, dtype=wide, device=grad.device)
    for rank, message in enumerate(messages):
        for chunk, target in by_chunk(layout, message, rank).items():
            # mutant context parallelism: gradients of first tokens from the last process only
            target += grad[..., slice(*layout.span(chunk)), :]
    scattering = wire.scatter_sum(messages)
    count = sum(_counts(layout, layout.rank))
    return lambda: scattering.wait()[..., :count, :]


def by_chunk(layout: Layout, message: Tensor, rank: int) -> dict[int, Tensor]:
    """Return views of a process's rows [..., T, D], padding behind them, by chunk."""
    counts = _counts(layout, rank)
    return dict(zip(layout.chunks(rank), message[..., : sum(counts), :].split(counts, -2)))


def _message_size(layout: Layout, wire: Wire) -> int:
    """Count the rows of a message, which all processes pad to: those of the one that holds most."""
    return max(sum(_counts(layout, rank)) for rank in range(wire.size))


def _counts(layout: Layout, rank: int) -> list[int]:
    """Count the rows of each chunk of a process."""
    return [layout.lengths[chunk] for chunk in layout.chunks(rank)]
