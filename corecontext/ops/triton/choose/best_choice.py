"""Choose groups by the best kernels for the device: Hopper's own where they can, else any GPU's."""

import torch
import triton
from torch import Tensor

from corecontext.ops.spec import Spec
from corecontext.ops.triton.attend import best
from corecontext.ops.triton.attend.shares import Choosing
from corecontext.ops.triton.choose import select
from corecontext.ops.triton.choose.byte_keys import to_bytes
from corecontext.ops.triton.choose.group_scores import Keys
from corecontext.ops.triton.launch import contiguous_rows

try:  # Gluon is young, as in `attend.best`
    from corecontext.ops.triton.choose import hopper_scores
except (ImportError, AttributeError):
    hopper_scores = None


def best_choice(
    q: Tensor, keys: Tensor, centre: Tensor | None, spec: Spec, settings: Choosing
) -> Tensor:
    """Return the groups of each share, [N, C, k], as `select.choose` does.

    Args:
        q: The mean query of each share, [N, r, C, D].
        keys: The index's keys, [N, M, P, D'], in the dtype of q.
        centre: The mean key that was taken from them, [N, D], or None.
    """
    index = spec.index
    if (
        hopper_scores is not None
        and best.takes_hopper(q, spec)
        and hopper_scores.takes(index, spec.group_size, q.shape[3])
    ):
        try:
            numbers = to_bytes(q, keys, centre, spec.scale)
            return select.choose(hopper_scores.ByteScorer(numbers), settings)
        except triton.CompilationError as error:
            best.do_without_hopper(error)
    offsets = None if centre is None else index.centre_products(q, centre)
    if offsets is None:
        offsets = q.new_zeros(q.shape[:3], dtype=torch.float32)
    mapped = contiguous_rows(index.map_queries(q))
    offsets = (offsets * spec.scale).float().contiguous()
    return select.choose(Keys(mapped, offsets, contiguous_rows(keys)), settings)
