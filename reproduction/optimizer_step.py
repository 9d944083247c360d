"""Run one optimizer step of the miniature: gradients of a batch, then Muon and AdamW.

On a GPU a step is captured in one CUDA graph.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from corecontext.graphs import CapturedStep
from corecontext.inference.fuse import compiled_or_plain
from reproduction.miniature import HEAD_TOKENS, autocast, hidden_states
from reproduction.muon import Muon


def head_loss(
    weight: Tensor,
    hidden: Tensor,
    target: Tensor,
    weights: Tensor,
    teacher: Tensor | None = None,
    taught: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the losses of hidden states [n, C], and the number of answer
    tokens (weight above one) that are right.

    With a teacher's head and hidden states half of the loss is the divergence from its predictions.
    Unlike `corecontext.train.loss` each token has a weight.
    """
    logits = F.linear(hidden, weight)
    nll = F.cross_entropy(logits.float(), target, reduction="none")
    if teacher is not None and taught is not None:
        wanted = F.linear(taught, teacher).float().log_softmax(-1)
        predicted = logits.float().log_softmax(-1)
        divergence = F.kl_div(predicted, wanted, reduction="none", log_target=True).sum(-1)
        nll = 0.5 * nll + 0.5 * divergence
    right = logits.detach().argmax(-1) == target
    return (nll * weights).sum(), (right & (weights > 1)).sum()


@functools.cache
def _fused_head() -> Callable[..., tuple[Tensor, Tensor]]:
    """Compile `head_loss`: no float32 copies of the logits, 16,384 numbers a token, are written."""
    return compiled_or_plain(head_loss, "head_loss")


def loss_backward(
    model: LlamaForCausalLM,
    ids: Tensor,
    weights: Tensor,
    device: str,
    teacher: LlamaForCausalLM | None,
) -> tuple[Tensor, Tensor]:
    """Compute gradients of the weighted mean loss, without waiting for the GPU.

    The head runs in chunks, each with its backward, so that no logits of the whole batch are held.

    Returns:
        The loss, and the share of answer tokens right.
    """
    target = ids[:, 1:].flatten()
    weights = weights[:, 1:].flatten().float()
    with autocast(device):
        hidden = hidden_states(model, ids)
        taught = None
        if teacher is not None:
            with torch.no_grad():
                taught = hidden_states(teacher, ids).flatten(0, 1)
    leaf = hidden.detach().requires_grad_()
    is_wide = model.lm_head.weight.shape[0] > HEAD_TOKENS
    head = _fused_head() if device.startswith("cuda") and is_wide else head_loss
    total = weights.sum()
    mean = torch.zeros((), device=ids.device)
    right = torch.zeros((), device=ids.device)
    for start in range(0, len(target), HEAD_TOKENS):
        chunk = slice(start, start + HEAD_TOKENS)
        lesson: tuple[Tensor, ...] = ()
        if teacher is not None and taught is not None:
            lesson = (teacher.lm_head.weight, taught[chunk])
        with autocast(device):
            loss, hits = head(
                model.lm_head.weight,
                leaf.flatten(0, 1)[chunk],
                target[chunk],
                weights[chunk],
                *lesson,
            )
            loss = loss / total
        loss.backward()
        mean = mean + loss.detach()
        right = right + hits
    hidden.backward(leaf.grad)
    return mean, right / (weights > 1).sum().clamp(min=1)


@contextlib.contextmanager
def half_stream(model: LlamaForCausalLM, device: str) -> Iterator[None]:
    """Pass bfloat16 from layer to layer on a GPU, as in a model of that dtype.

    Autocast alone leaves it float32, as the weights of embedding and norms are: twice the bytes,
    and a copy before every product.
    """
    modules: list[Any] = []
    if device.startswith("cuda"):
        modules = [module for module in model.modules() if _is_wide(module)]
    for module in modules:  # not by a hook, which a compiler would run by itself
        module.forward = _to_half(module.forward)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _is_wide(module: torch.nn.Module) -> bool:
    """Whether a module's output is float32 under autocast."""
    return isinstance(module, torch.nn.Embedding) or type(module).__name__.endswith("RMSNorm")


def _to_half(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: forward(x).to(torch.bfloat16)


TRAINED = {"all": ("",), "qkv": ("q_proj", "k_proj", "v_proj"), "lora": ("lora_",)}
"""Parts of the names of the parameters that are trained."""


def optimizers(model: LlamaForCausalLM, lr: float, trains: str) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for the rest (LoRA's factors too).

    Rates are tensors beside the weights, so that a captured step reads their current values.
    """
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(layer in name for layer in TRAINED[trains]))
        if not parameter.requires_grad:
            continue
        if parameter.dim() == 2 and ".layers." in name and "lora_" not in name:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    if rest:
        options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
        made.append(torch.optim.AdamW(rest, lr, capturable=model.device.type == "cuda", **options))
    for group in (group for optimizer in made for group in optimizer.param_groups):
        group["peak"] = group["lr"]
        group["lr"] = torch.tensor(group["lr"], device=model.device)
    return made


def lr_factor(step: int, steps: int) -> float:
    """Warm up over 50 steps or a tenth, then follow a cosine to 10 %."""
    warm_up = max(1, min(50, steps // 10))
    cosine = 1 + math.cos(math.pi * min(1.0, step / max(1, steps)))
    return min(1.0, (step + 1) / warm_up) * (0.1 + 0.45 * cosine)


class Step:
    """Run one optimizer step on a batch, without waiting for its results.

    On a GPU, steps after the first few of a batch shape are replayed from a CUDA graph: launching
    the kernels of a model this small takes Python about as long as running them.
    """

    WARM_UP = 3  # steps not captured: kernels are compiled, optimizers make their state

    def __init__(
        self,
        model: LlamaForCausalLM,
        opts: list[torch.optim.Optimizer],
        device: str,
        teacher: LlamaForCausalLM | None,
    ) -> None:
        self.model = model
        self.optimizers = opts
        self.device = device
        self.teacher = teacher
        self.captures = device.startswith("cuda")
        self._trained = [p for group in self._groups() for p in group["params"]]
        self._inputs: tuple[Tensor, ...] = ()
        self._step: Callable[[], tuple[Tensor, Tensor]] = self._run

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups, which are new ones after a state was loaded."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def set_rates(self, factor: float) -> None:
        """Set the learning rates to their peaks times a factor."""
        for group in self._groups():
            group["lr"].fill_(group["peak"] * factor)

    def __call__(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the share of answer tokens right."""
        if not self._inputs or self._inputs[0].shape != ids.shape:
            self._inputs = (ids.to(self.device), weights.to(self.device))
            if self.captures:
                # "thread_local": meanwhile the loader's thread takes pinned memory.
                self._step = CapturedStep(
                    self._run,
                    name="an optimizer step",
                    warm_up=self.WARM_UP,
                    error_mode="thread_local",
                )
        for buffer, values in zip(self._inputs, (ids, weights)):
            buffer.copy_(values, non_blocking=True)
        loss, right = self._step()
        return loss.clone(), right.clone()

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed from a graph."""
        return isinstance(self._step, CapturedStep) and self._step.recorded

    def _run(self) -> tuple[Tensor, Tensor]:
        # A capture that failed may have left gradients.
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        ids, weights = self._inputs
        loss, right = loss_backward(self.model, ids.long(), weights, self.device, self.teacher)
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss, right
