"""The loss of a language model without the logits of the whole sequence: L x vocabulary numbers never exist."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from corecontext.data.packing import IGNORED


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, count: Tensor | float, chunk: int, *,
                          softcap: float | None = None) -> Tensor:
    """Sum over tokens of -log softmax(hidden weight^T)[label], divided by `count`, a chunk of tokens at a time.

    Gradients are made with the loss, while a chunk's logits exist, so that they are computed once. torch's own
    `linear_cross_entropy` does the same but gives the loss in the dtype of `hidden`, which bfloat16 is too coarse for.

    Args:
        hidden: [T, d], in the dtype of the products. weight: [V, d], cast to it. labels: [T]; -100 leaves a token out.
        chunk: Tokens whose logits [chunk, V] exist at once.
        softcap: Logits become softcap * tanh(logit / softcap), as in Gemma 2.

    Returns:
        A number in float32; differentiable once in hidden and weight, the latter's gradient summed in float32.
    """
    count = torch.as_tensor(count, dtype=torch.float32, device=hidden.device).clamp(min=1)
    return _ChunkedLoss.apply(hidden, weight, labels, count, chunk, softcap)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients chunk by chunk; the backward only scales."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, count: Tensor, chunk: int,
                softcap: float | None) -> Tensor:
        matrix, total = weight.to(hidden.dtype), torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for low in range(0, hidden.shape[0], chunk):
            rows = slice(low, low + chunk)
            logits = F.linear(hidden[rows], matrix).float()  # [chunk, V]
            slope = None
            if softcap is not None:
                capped = torch.tanh(logits / softcap)
                logits, slope = softcap * capped, 1 - capped.square()
            wanted = labels[rows].clamp(min=0)[:, None]
            shares = (labels[rows] != IGNORED).float() / count  # before rounding to the dtype of hidden
            lse = logits.logsumexp(-1)
            total += ((lse - logits.gather(1, wanted)[:, 0]) * shares).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            grad = logits.sub_(lse[:, None]).exp_()
            grad.scatter_add_(1, wanted, grad.new_full(wanted.shape, -1.0)).mul_(shares[:, None])
            if slope is not None:
                grad *= slope
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ matrix
            if grad_weight is not None:
                grad_weight += grad.mT @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (None if grad_hidden is None else grad_hidden * grad.to(grad_hidden.dtype),
                None if grad_weight is None else (grad_weight * grad).to(ctx.dtype), None, None, None, None)


def compute_loss_in_chunks(model: PreTrainedModel, chunk: int) -> None:
    """From now on this model answers calls with labels by their loss alone, computed in chunks.

    `shift_labels` (already moved by one: what each token is to predict) may stand for `labels`, and
    `num_items_in_batch` is what the sum is divided by, as in transformers. Calls without either are as before.
    Only this instance changes; what cannot be done in chunks (a head with bias or LoRA's matrices, a router's loss) is
    left to the model.
    """
    whole = model.forward

    @functools.wraps(whole)
    def forward(*args: Any, labels: Tensor | None = None, shift_labels: Tensor | None = None,
                num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        head = model.get_output_embeddings()
        if labels is None and shift_labels is None:
            return whole(*args, **kwargs)
        plain = isinstance(head, torch.nn.Linear) and head.bias is None
        if not plain or getattr(model.config, "output_router_logits", False):
            return whole(*args, labels=shift_labels if labels is None else labels, shift_labels=shift_labels,
                         num_items_in_batch=num_items_in_batch, **kwargs)
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        kwargs.pop("logits_to_keep", None)
        hidden = model.base_model(*args, **kwargs).last_hidden_state.flatten(0, 1)
        if hasattr(head, "unshard"):  # FSDP gathers a module's weights when it is called, which the head is not
            head.unshard()
        weight, device = head.weight, hidden.device.type
        count = (shift_labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        with torch.autocast(device, enabled=False):
            loss = chunked_cross_entropy(hidden.to(dtype), weight, shift_labels.flatten().to(hidden.device), count,
                                         chunk, softcap=getattr(model.config, "final_logit_softcapping", None))
        return CausalLMOutputWithPast(loss=loss)

    model.forward = forward
