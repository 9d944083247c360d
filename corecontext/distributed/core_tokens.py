"""Send core tokens and their masses to all processes, and the gradients back to those that made
them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.distributed.call import Call
from corecontext.distributed.wire import Gathering


def no_cores(call: Call, like: Tensor) -> Tensor:
    """Return keys and values of no core token, [2, N, 1, 0, D], in the dtype of `like`."""
    shape = call.halo.shape
    return like.new_empty(2, shape.batch_size * shape.num_kv_heads, 1, 0, shape.head_dim)


def no_masses(call: Call, like: Tensor) -> Tensor:
    """Return the masses of no core token, [1, N, 1, 0, 1], in float32 or wider."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return no_cores(call, like)[:1, ..., :1].to(wide)


def far_mass(call: Call, chunk: int, masses: Tensor | None) -> Tensor | None:
    """Return the masses of the core tokens that a chunk sees far away, [N, r, M], of all [1, N, 1,
    M', 1]."""
    if masses is None:
        return None
    shape = call.halo.shape
    return masses[0, ..., : call.far(chunk), 0].expand(
        -1, shape.num_heads // shape.num_kv_heads, -1
    )


def gather_entries(call: Call, made: list[Tensor], empty: Tensor) -> Gathering:
    """Send this process's core tokens, [2, N, 1, m, D] for each chunk, or their masses, [1, N, 1,
    m, 1], to all processes; padded to the largest share.

    Args:
        empty: Such a tensor of no core token.
    """
    message = torch.cat([empty, *made], 3)
    return call.halo.wire.gather(F.pad(message, (0, 0, 0, call.message_size - message.shape[3])))


def split_message(call: Call, message: Tensor, rank: int) -> dict[int, Tensor]:
    """Split the core tokens that a process made, [2, N, 1, m, D], by chunk; views."""
    counts = call.counts(rank)
    pieces = message[:, :, :, : sum(counts)].split(counts, 3)
    return dict(zip(call.layout.chunks(rank), pieces))


def in_order(call: Call, messages: Tensor) -> Tensor:
    """Return the core tokens of the whole sequence, [2, N, 1, M, D], from all processes'
    messages."""
    pieces: dict[int, Tensor] = {}
    for rank, message in enumerate(messages):
        pieces |= split_message(call, message, rank)
    none = messages[0][:, :, :, :0]  # where no group is complete
    return torch.cat([none, *(pieces[chunk] for chunk in sorted(pieces))], 3)


def scatter_grads(call: Call, grads: Tensor) -> Gathering:
    """Send gradients of core tokens [2, N, 1, M, D], or of masses [1, N, 1, M, 1], to the
    processes that made them."""
    size = call.halo.wire.size
    messages = grads.new_zeros(size, *grads.shape[:3], call.message_size, grads.shape[4])
    for rank, message in enumerate(messages):
        for chunk, target in split_message(call, message, rank).items():
            target.copy_(grads[:, :, :, slice(*call.layout.groups(chunk, call.spec.group_size))])
    return call.halo.wire.scatter_sum(messages)
