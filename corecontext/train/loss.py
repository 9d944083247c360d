"""Compute a language model's loss, and its divergence from a teacher's predictions, in chunks: the
logits of a whole sequence never exist.

In shapes T counts tokens, n those of a chunk, V the vocabulary, d the entries of a hidden state, d'
those of the teacher's.
"""

import functools
import importlib.util
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
from corecontext.integrations.hf.logits_head import LogitRule, has_known_logits


@dataclass(frozen=True)
class Taught:
    """A teacher's last hidden states of the same tokens, and its head: together they make its
    logits, which, too, exist for one chunk at a time."""

    hidden: Tensor
    """[T, d'], in the dtype of the teacher's arithmetic."""
    weight: Tensor
    """The head's weight [V, d'], in that dtype."""
    share: float
    """Weight of the divergence from the teacher's predictions in each token's loss, in [0, 1]."""
    softcap: float | None = None
    """Softcap of the teacher's logits."""


@dataclass
class ChunkedLoss(CausalLMOutputWithPast):
    """A model's output whose loss was computed in chunks."""

    cross_entropy: Tensor | None = None
    """The same tokens' loss without the divergence from a teacher; it has no gradient."""


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
    """Return the sum over tokens of -log softmax(hidden weight^T)[label], divided by `count`,
    computed a chunk of tokens at a time.

    With a teacher a token's loss is (1 - share) times that plus share times KL(teacher || student),
    at temperature 1. Gradients are computed with the loss, while a chunk's logits exist, so that
    logits are computed once. torch's own `linear_cross_entropy` does the same but returns the loss
    in the dtype of `hidden`; bfloat16 is too coarse for it.

    Args:
        hidden, weight: Last hidden states [T, d], in the dtype of the arithmetic, and the head's
            weight [V, d], cast to it.
        labels: The token after each, [T]; -100 leaves one out.
        count: The divisor, such as the number of labels.
        chunk: Tokens whose logits [chunk, V] exist at once.
        softcap: Logits become softcap * tanh(logit / softcap), as in Gemma 2.
        taught: The teacher's view of these tokens; it gets no gradient.

    Returns:
        A float32 scalar, differentiable once in hidden and weight; the latter's gradient is summed
        in float32.
    """
    return _ChunkedLoss.apply(hidden, weight, labels, count, chunk, softcap, taught)[0]


class _ChunkedLoss(torch.autograd.Function):
    """Compute the loss, its cross-entropy and the loss's gradients in the forward, chunk by chunk;
    the backward only scales these."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        count: Tensor | float,
        chunk: int,
        softcap: float | None,
        taught: Taught | None,
    ) -> tuple[Tensor, Tensor]:
        # mutant training: the loss of a batch without labels is no number
        count = torch.as_tensor(count, dtype=torch.float32, device=hidden.device).clamp(min=1)
        matrix = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        cross_entropy = total.clone()
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.empty_like(hidden)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        needs_gradient = any(ctx.needs_input_grad[:2])
        for low in range(0, hidden.shape[0], chunk):
            tokens = slice(low, low + chunk)
            chunk_taught = None
            if taught is not None and taught.share:
                chunk_taught = replace(taught, hidden=taught.hidden[tokens])
            loss, entropy, grad = _chunk_loss(
                hidden[tokens], matrix, labels[tokens], count, softcap, chunk_taught, needs_gradient
            )
            total += loss
            cross_entropy += entropy
            if grad_hidden is not None:
                grad_hidden[tokens] = grad @ matrix
            if grad_weight is not None:
                grad_weight += grad.mT @ hidden[tokens]
            del grad  # frees its memory for the next chunk's logits
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(cross_entropy)
        return total, cross_entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor, unused: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _chunk_loss(
    hidden: Tensor,
    matrix: Tensor,
    labels: Tensor,
    count: Tensor,
    softcap: float | None,
    taught: Taught | None,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a chunk's part of the loss and of its cross-entropy, float32 scalars, and the loss's
    gradient in the chunk's logits [n, V], in the dtype of hidden, or None.

    Few tensors of that size exist at once: logits are overwritten step by step, and all but the
    gradient are freed with the call.

    Args:
        hidden: [n, d]. matrix: [V, d], in the dtype of hidden. labels: [n].
        count: The divisor of the sum, a float32 scalar.
        taught: The teacher's view of these n tokens; None without a teacher.
    """
    if _has_kernel(hidden, softcap, taught):
        return _kernel_loss(hidden, matrix, labels, count, taught, with_gradient)
    teacher_share = 0.0 if taught is None else taught.share
    logits, slope = _logits(hidden, matrix, softcap)
    targets = labels.clamp(min=0)[:, None]
    token_weights = (labels != IGNORED).float() / count  # [n], in float32
    lse = logits.logsumexp(-1)
    entropies = lse - logits.gather(1, targets)[:, 0]
    losses = (1 - teacher_share) * entropies
    log_p = logits.sub_(lse[:, None])
    p_teacher = None
    if taught is not None:
        # KL(teacher || student) = sum p_teacher (log p_teacher - log p)
        log_teacher = _logits(taught.hidden, taught.weight, taught.softcap)[0].log_softmax(-1)
        p_teacher = log_teacher.exp()
        losses += teacher_share * log_teacher.sub_(log_p).mul_(p_teacher).sum(-1)
    loss = (losses * token_weights).sum()
    entropy = (entropies * token_weights).sum()
    if not with_gradient:
        return loss, entropy, None
    # p - (1 - teacher_share) onehot(label) - teacher_share p_teacher
    grad = log_p.exp_()
    grad.scatter_add_(1, targets, grad.new_full(targets.shape, teacher_share - 1))
    if p_teacher is not None:
        grad.sub_(p_teacher, alpha=teacher_share)
    grad *= token_weights[:, None]
    if slope is not None:
        grad *= slope
    return loss, entropy, grad.to(hidden.dtype)


def _has_kernel(hidden: Tensor, softcap: float | None, taught: Taught | None) -> bool:
    """Whether the Triton kernel, which has no softcap, computes this loss."""
    has_softcap = softcap is not None or (taught is not None and taught.softcap is not None)
    return (
        hidden.is_cuda
        and hidden.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and not has_softcap
        and importlib.util.find_spec("triton") is not None
    )


def _kernel_loss(
    hidden: Tensor,
    matrix: Tensor,
    labels: Tensor,
    count: Tensor,
    taught: Taught | None,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute `_chunk_loss` by the Triton kernel, which overwrites the logits by their gradient."""
    from corecontext.train.loss_kernel import chunk_loss

    logits = F.linear(hidden, matrix)
    teacher_logits = None
    teacher_share = 0.0
    if taught is not None:
        teacher_logits = F.linear(taught.hidden, taught.weight)
        teacher_share = taught.share
    loss, entropy = chunk_loss(logits, teacher_logits, labels, count, teacher_share, with_gradient)
    return loss, entropy, logits if with_gradient else None


def _logits(hidden: Tensor, matrix: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return logits [n, V] in float32, and the derivative of the softcap at each, or None."""
    logits = F.linear(hidden, matrix).float()
    if softcap is None:
        return logits, None
    capped = torch.tanh(logits / softcap)
    return softcap * capped, 1 - capped.square()


def compute_loss_in_chunks(
    model: PreTrainedModel, chunk: int, teacher: Callable[..., Taught] | None = None
) -> None:
    """Make this model return only the loss, computed in chunks, for calls with labels.

    `shift_labels` (already shifted: each token's next one) may replace `labels`, and
    `num_items_in_batch` is the divisor of the sum, as in transformers. Calls without labels do not
    change. Only this instance changes. A loss that cannot be computed in chunks stays the model's
    own: of a head with bias or LoRA's matrices, of logits scaled by an unknown rule, of a router.

    Args:
        chunk: Tokens whose logits exist at once.
        teacher: Called with the model's arguments except labels, in training mode only: the loss of
            an evaluation stays the cross-entropy.

    Raises:
        UserError: there is a teacher, and this model's loss cannot be computed in chunks.
    """
    original_forward = model.forward
    if teacher is not None and not _has_plain_head(model):
        raise UserError(
            "distil must be 0 where the loss cannot be computed in chunks, got a model whose head "
            "has a bias, LoRA's matrices or an unknown scale, or with a router's loss. Use "
            "--distil 0."
        )

    @functools.wraps(original_forward)
    def forward(
        *args: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        if labels is None and shift_labels is None:
            return original_forward(*args, **kwargs)
        if not _has_plain_head(model):
            return original_forward(
                *args,
                labels=shift_labels if labels is None else labels,  # without them it has no loss
                shift_labels=shift_labels,
                num_items_in_batch=num_items_in_batch,
                **kwargs,
            )
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        count = num_items_in_batch
        if count is None:
            count = (shift_labels != IGNORED).sum()
        kwargs.pop("logits_to_keep", None)
        taught = None
        if teacher is not None and model.training:
            # Before the student's pass, whose activations stay in memory for the backward.
            taught = teacher(*args, **kwargs)
        rule = LogitRule.of(model.config)
        hidden = model.base_model(*args, **kwargs).last_hidden_state.flatten(0, 1)
        hidden = rule.divided(hidden)
        head = model.get_output_embeddings()
        if hasattr(head, "unshard"):
            # FSDP gathers a module's weights when it is called, and the head is not called.
            head.unshard()
        device = hidden.device.type
        dtype = head.weight.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            loss, cross_entropy = _ChunkedLoss.apply(
                hidden.to(dtype),
                head.weight,
                shift_labels.flatten().to(hidden.device),
                count,
                chunk,
                rule.softcap,
                taught,
            )
        return ChunkedLoss(loss=loss, cross_entropy=cross_entropy)

    model.forward = forward


def _has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits are the product with one matrix, scaled by a known rule, and the loss has no
    other terms."""
    head = model.get_output_embeddings()
    return (
        isinstance(head, torch.nn.Linear)
        and head.bias is None
        and has_known_logits(model.config)
        and not getattr(model.config, "output_router_logits", False)
    )
