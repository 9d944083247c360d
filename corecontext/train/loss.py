"""The loss of a language model without the logits of the whole sequence: L x vocabulary numbers
never exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from corecontext.data.packing import IGNORED
from corecontext.files import UserError


@dataclass(frozen=True)
class Taught:
    """What a teacher makes of the same tokens; its logits, too, exist for one chunk at a time."""

    hidden: Tensor
    """[T, d'], in the dtype of the teacher's products."""
    weight: Tensor
    """[V, d'], of its head, in that dtype."""
    share: float
    """How much of each token's loss is the divergence from the teacher's predictions, in [0, 1]."""
    softcap: float | None = None
    """Of its logits."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    count: Tensor | float,
    chunk: int,
    *,
    softcap: float | None = None,
    taught: Taught | None = None,
) -> Tensor:
    """Sum over tokens of -log softmax(hidden weight^T)[label], divided by `count`, a chunk of
    tokens at a time.

    With a teacher a token's loss is (1 - share) times that plus share times KL(teacher || student),
    at temperature 1. Gradients are made with the loss, while a chunk's logits exist, so that they
    are computed once. torch's own `linear_cross_entropy` does the same but gives the loss in the
    dtype of `hidden`, which bfloat16 is too coarse for.

    Args:
        hidden: [T, d], in the dtype of the products. weight: [V, d], cast to it. labels: [T]; -100
            leaves a token out.
        chunk: Tokens whose logits [chunk, V] exist at once.
        softcap: Logits become softcap * tanh(logit / softcap), as in Gemma 2.
        taught: The teacher's view of these tokens; it gets no gradient.

    Returns:
        A number in float32; differentiable once in hidden and weight, the latter's gradient summed
        in float32.
    """
    count = torch.as_tensor(count, dtype=torch.float32, device=hidden.device).clamp(min=1)
    return _ChunkedLoss.apply(hidden, weight, labels, count, chunk, softcap, taught)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients chunk by chunk; the backward only scales."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        count: Tensor,
        chunk: int,
        softcap: float | None,
        taught: Taught | None,
    ) -> Tensor:
        matrix, total = (
            weight.to(hidden.dtype),
            torch.zeros((), dtype=torch.float32, device=hidden.device),
        )
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        for low in range(0, hidden.shape[0], chunk):
            rows = slice(low, low + chunk)
            part = (
                None
                if taught is None or not taught.share
                else replace(taught, hidden=taught.hidden[rows])
            )
            loss, grad = _of_chunk(
                hidden[rows],
                matrix,
                labels[rows],
                count,
                softcap,
                part,
                grad_hidden is not None or grad_weight is not None,
            )
            total += loss
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ matrix
            if grad_weight is not None:
                grad_weight += grad.mT @ hidden[rows]
            del grad  # or it would be there beside the next chunk's logits
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad).to(ctx.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _of_chunk(
    hidden: Tensor,
    matrix: Tensor,
    labels: Tensor,
    count: Tensor,
    softcap: float | None,
    taught: Taught | None,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """A chunk's part of the loss and, or None, the gradient of its logits [n, V] in the dtype of
    hidden; what else has that many numbers is gone with the call."""
    share = 0.0 if taught is None else taught.share
    logits, slope = _logits(hidden, matrix, softcap)
    wanted = labels.clamp(min=0)[:, None]
    shares = (labels != IGNORED).float() / count  # before rounding to the dtype of hidden
    lse = logits.logsumexp(-1)
    losses = (1 - share) * (lse - logits.gather(1, wanted)[:, 0])
    log_p = logits.sub_(lse[:, None])
    p_teacher = None
    if taught is not None:
        log_teacher = _logits(taught.hidden, taught.weight, taught.softcap)[0].log_softmax(-1)
        p_teacher = log_teacher.exp()
        losses += share * log_teacher.sub_(log_p).mul_(p_teacher).sum(-1)
    loss = (losses * shares).sum()
    if not with_gradient:
        return loss, None
    grad = log_p.exp_()  # less (1 - share) at the label and share of the teacher's probabilities
    grad.scatter_add_(1, wanted, grad.new_full(wanted.shape, share - 1))
    if p_teacher is not None:
        grad.sub_(p_teacher, alpha=share)
    grad *= shares[:, None]
    if slope is not None:
        grad *= slope
    return loss, grad.to(hidden.dtype)


def _logits(hidden: Tensor, matrix: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Logits [n, V] in float32, and the softcap's slope there."""
    logits = F.linear(hidden, matrix).float()
    if softcap is None:
        return logits, None
    capped = torch.tanh(logits / softcap)
    return softcap * capped, 1 - capped.square()


def compute_loss_in_chunks(
    model: PreTrainedModel, chunk: int, teacher: Callable[..., Taught] | None = None
) -> None:
    """From now on this model answers calls with labels by their loss alone, computed in chunks.

    `shift_labels` (already moved by one: what each token is to predict) may stand for `labels`, and
    `num_items_in_batch` is what the sum is divided by, as in transformers. Calls without either are
    as before. Only this instance changes; what cannot be done in chunks (a head with bias or LoRA's
    matrices, a router's loss) is left to the model.

    Args:
        teacher: Called with what the model is called with, but for labels, while it trains; its
            evaluation's loss stays the cross-entropy.

    Raises:
        UserError: there is a teacher, and this model's loss cannot be computed in chunks.
    """
    whole = model.forward
    if teacher is not None and not _in_chunks(model):
        raise UserError(
            "distil must be 0 where the loss cannot be computed in chunks, got a model whose head has a "
            "bias or LoRA's matrices, or with a router's loss. Use --distil 0."
        )

    @functools.wraps(whole)
    def forward(
        *args: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        head = model.get_output_embeddings()
        if labels is None and shift_labels is None:
            return whole(*args, **kwargs)
        if not _in_chunks(model):
            return whole(
                *args,
                labels=shift_labels if labels is None else labels,
                shift_labels=shift_labels,
                num_items_in_batch=num_items_in_batch,
                **kwargs,
            )
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        kwargs.pop("logits_to_keep", None)
        taught = None
        if (
            teacher is not None and model.training
        ):  # before the student, which holds activations for the backward
            taught = teacher(*args, **kwargs)
        hidden = model.base_model(*args, **kwargs).last_hidden_state.flatten(0, 1)
        if hasattr(
            head, "unshard"
        ):  # FSDP gathers a module's weights when it is called, which the head is not
            head.unshard()
        weight, device = head.weight, hidden.device.type
        count = (
            (shift_labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        )
        dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        )
        with torch.autocast(device, enabled=False):
            loss = chunked_cross_entropy(
                hidden.to(dtype),
                weight,
                shift_labels.flatten().to(hidden.device),
                count,
                chunk,
                softcap=getattr(model.config, "final_logit_softcapping", None),
                taught=taught,
            )
        return CausalLMOutputWithPast(loss=loss)

    model.forward = forward


def _in_chunks(model: PreTrainedModel) -> bool:
    """Whether the loss is that of a plain matrix, and nothing else."""
    head = model.get_output_embeddings()
    return (
        isinstance(head, torch.nn.Linear)
        and head.bias is None
        and not getattr(model.config, "output_router_logits", False)
    )
