"""Compute a chunk's loss and the gradient of its logits in Triton: logits are read twice, without
a copy in float32, and the gradient overwrites them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.data.packing import IGNORED
from corecontext.ops.triton.launch import launch, power_of_2

MOST_COLUMNS = 4096
"""Entries of the vocabulary that a program holds at once."""
_IGNORED = tl.constexpr(IGNORED)


@triton.jit
def loss_kernel(
    logits_ptr,
    teacher_ptr,
    labels_ptr,
    count_ptr,
    loss_ptr,
    entropy_ptr,
    teacher_share,
    vocabulary,
    HAS_TEACHER: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write each token's part of the loss and of its cross-entropy [n], in float32; with
    HAS_GRADIENT overwrite its logits by their gradient. Logarithms are natural.

    Grid: n tokens, whose logits and teacher's logits are the rows of [n, V], V = vocabulary.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    teacher_ptr += row * vocabulary
    label = tl.load(labels_ptr + row)
    weight = tl.where(label == _IGNORED, 0.0, 1.0 / tl.load(count_ptr))
    at_label = tl.load(logits_ptr + tl.maximum(label, 0)).to(tl.float32)
    # In one pass: an online softmax of the student's logits x and one of the teacher's y, and the
    # sum of y - x weighted by the latter.
    running_max = -float("inf")
    running_sum = 0.0
    teacher_max = -float("inf")
    teacher_sum = 0.0
    weighted_difference = 0.0
    for low in range(0, vocabulary, BLOCK):
        columns = low + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = tl.load(logits_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(running_max, tl.max(x, 0))
        running_sum = running_sum * tl.exp(running_max - new_max) + tl.sum(tl.exp(x - new_max), 0)
        running_max = new_max
        if HAS_TEACHER:
            y = tl.load(teacher_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
            new_max = tl.maximum(teacher_max, tl.max(y, 0))
            fade = tl.exp(teacher_max - new_max)
            weights = tl.exp(y - new_max)
            teacher_sum = teacher_sum * fade + tl.sum(weights, 0)
            products = tl.where(inside, weights * (y - x), 0.0)
            weighted_difference = weighted_difference * fade + tl.sum(products, 0)
            teacher_max = new_max
    lse = running_max + tl.log(running_sum)
    entropy = lse - at_label
    loss = (1 - teacher_share) * entropy
    teacher_lse = 0.0
    if HAS_TEACHER:
        # KL(teacher || student) = sum p_teacher (y - x) - teacher_lse + lse
        teacher_lse = teacher_max + tl.log(teacher_sum)
        loss += teacher_share * (weighted_difference / teacher_sum - teacher_lse + lse)
    tl.store(loss_ptr + row, loss * weight)
    tl.store(entropy_ptr + row, entropy * weight)
    if HAS_GRADIENT:
        for low in range(0, vocabulary, BLOCK):
            columns = low + tl.arange(0, BLOCK)
            inside = columns < vocabulary
            x = tl.load(logits_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
            # p - (1 - teacher_share) onehot(label) - teacher_share p_teacher
            grad = tl.exp(x - lse) - tl.where(columns == label, 1 - teacher_share, 0.0)
            if HAS_TEACHER:
                y = tl.load(teacher_ptr + columns, mask=inside, other=-float("inf"))
                grad -= teacher_share * tl.exp(y.to(tl.float32) - teacher_lse)
            grad = (grad * weight).to(logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + columns, grad, mask=inside)


def chunk_loss(
    logits: Tensor,
    teacher: Tensor | None,
    labels: Tensor,
    count: Tensor,
    share: float,
    with_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return a chunk's part of the loss and of its cross-entropy, float32 scalars.

    Args:
        logits: [n, V], contiguous; with_gradient overwrites them by their gradient.
        teacher: The teacher's logits [n, V], contiguous; None where `share` is 0.
        labels: [n]; -100 leaves a token out.
        count: The divisor of the sum, a float32 scalar.
        share: Weight of the divergence from the teacher, in [0, 1].
    """
    rows, vocabulary = logits.shape
    row_losses = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    launch(
        loss_kernel,
        (rows,),
        (
            logits,
            logits if teacher is None else teacher,
            labels,
            count,
            row_losses[0],
            row_losses[1],
            share,
        ),
        specialized=(vocabulary,),  # its divisors decide how many entries a load takes
        num_warps=8,
        HAS_TEACHER=teacher is not None,
        HAS_GRADIENT=with_gradient,
        BLOCK=min(MOST_COLUMNS, power_of_2(vocabulary)),
    )
    loss, entropy = row_losses.sum(1)
    return loss, entropy
