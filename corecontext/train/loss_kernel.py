"""Compute a chunk's loss and the gradient of its logits in Triton: logits are read twice and stay
in their dtype, and the gradient takes their place."""

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
    HAS_GRADIENT the gradient of its logits over them.

    Grid: n. A program owns a row of logits [V].
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    teacher_ptr += row * vocabulary
    label = tl.load(labels_ptr + row)
    weight = tl.where(label == _IGNORED, 0.0, 1.0 / tl.load(count_ptr))
    at_label = tl.load(logits_ptr + tl.maximum(label, 0)).to(tl.float32)
    # Softmax maxima and sums of student and teacher, and the sum of the teacher's weights times
    # the difference of logits, in one pass.
    top = -float("inf")
    total = 0.0
    teacher_top = -float("inf")
    teacher_total = 0.0
    difference = 0.0
    for low in range(0, vocabulary, BLOCK):
        columns = low + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = tl.load(logits_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        top = new_top
        if HAS_TEACHER:
            y = tl.load(teacher_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
            new_top = tl.maximum(teacher_top, tl.max(y, 0))
            scale = tl.exp(teacher_top - new_top)
            weights = tl.exp(y - new_top)
            teacher_total = teacher_total * scale + tl.sum(weights, 0)
            products = tl.where(inside, weights * (y - x), 0.0)
            difference = difference * scale + tl.sum(products, 0)
            teacher_top = new_top
    lse = top + tl.log(total)
    entropy = lse - at_label
    loss = (1 - teacher_share) * entropy
    teacher_lse = 0.0
    if HAS_TEACHER:
        # KL(teacher || student) = sum p_teacher (y - x) - teacher_lse + lse
        teacher_lse = teacher_top + tl.log(teacher_total)
        loss += teacher_share * (difference / teacher_total - teacher_lse + lse)
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
        logits: [n, V], contiguous; with_gradient leaves their gradient in their place.
        teacher: The teacher's logits [n, V], contiguous; None where share is 0.
        labels: [n]; -100 leaves a token out.
        count: The divisor of the sum, a float32 scalar.
        share: Share of the divergence from the teacher.
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
