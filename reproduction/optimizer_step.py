"""One optimizer step of the miniature: gradients of a batch, Muon and AdamW; on a GPU captured as
one graph."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

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
    """The weighted sum of the losses of hidden states [n, C], and how many answer tokens (weight
    above one) are right.

    With a teacher's head and hidden states half of the loss is the divergence from its predictions.
    """
    logits = F.linear(hidden, weight)
    nll = F.cross_entropy(logits.float(), target, reduction="none")
    if teacher is not None and taught is not None:
        wanted = F.linear(taught, teacher).float().log_softmax(-1)
        far = F.kl_div(
            logits.float().log_softmax(-1), wanted, reduction="none", log_target=True
        ).sum(-1)
        nll = 0.5 * nll + 0.5 * far
    return (nll * weights).sum(), ((logits.detach().argmax(-1) == target) & (weights > 1)).sum()


@functools.cache
def _fused_head() -> Callable[..., tuple[Tensor, Tensor]]:
    """`head_loss` compiled: of the logits, 16,384 numbers for each token, no copies in float32 are
    written."""
    return compiled_or_plain(head_loss, "head_loss")


def loss_backward(
    model: LlamaForCausalLM,
    ids: Tensor,
    weights: Tensor,
    device: str,
    teacher: LlamaForCausalLM | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the weighted mean loss, its value, and the share of answer tokens right; nothing
    waits for the GPU.

    The head is run in parts, backward at once, so that no logits of the whole batch are held.
    """
    target, weights = ids[:, 1:].flatten(), weights[:, 1:].flatten().float()
    with autocast(device):
        hidden = hidden_states(model, ids)
        taught = None
        if teacher is not None:
            with torch.no_grad():
                taught = hidden_states(teacher, ids).flatten(0, 1)
    leaf = hidden.detach().requires_grad_()
    found, right = torch.zeros(2, device=ids.device)
    head, total = _fused_head() if device.startswith("cuda") else head_loss, weights.sum()
    for part in (slice(start, start + HEAD_TOKENS) for start in range(0, len(target), HEAD_TOKENS)):
        given = () if teacher is None or taught is None else (teacher.lm_head.weight, taught[part])
        with autocast(device):
            loss, hits = head(
                model.lm_head.weight, leaf.flatten(0, 1)[part], target[part], weights[part], *given
            )
            loss = loss / total
        loss.backward()
        found, right = found + loss.detach(), right + hits
    hidden.backward(leaf.grad)
    return found, right / (weights > 1).sum().clamp(min=1)


@contextlib.contextmanager
def half_stream(model: LlamaForCausalLM, device: str) -> Iterator[None]:
    """What goes from layer to layer is bfloat16 on a GPU, as in a model of that dtype: autocast
    alone leaves it float32, as the weights of embedding and norms are, which is twice the bytes and
    a copy before every product."""
    wanted = (
        [
            module
            for module in model.modules()
            if isinstance(module, torch.nn.Embedding) or type(module).__name__.endswith("RMSNorm")
        ]
        if device.startswith("cuda")
        else []
    )
    for module in wanted:  # not by a hook, which a compiler would run by itself
        module.forward = _to_half(module.forward)
    try:
        yield
    finally:
        for module in wanted:
            del module.forward


def _to_half(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: forward(x).to(torch.bfloat16)


def optimizers(model: LlamaForCausalLM, lr: float, trains: str) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest (LoRA's factors too); of what is
    trained.

    Rates are tensors beside the weights, so that a captured step reads what they are then.
    """
    wanted = {"all": ("",), "qkv": ("q_proj", "k_proj", "v_proj", ".cca."), "lora": ("lora_",)}[
        trains
    ]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(one in name for one in wanted))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [
        p
        for name, p in named.items()
        if p.dim() == 2
        and ".layers." in name
        and not any(one in name for one in (".cca.", "lora_"))
    ]
    chosen = {id(p) for p in matrices}
    few = [p for name, p in named.items() if ".cca." in name]
    chosen |= {id(p) for p in few}
    rest = [p for p in named.values() if id(p) not in chosen]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    for some, rate in (
        (rest, lr),
        (few, 10 * lr),
    ):  # few start at zero and have a short time to go far
        if some:
            found.append(
                torch.optim.AdamW(
                    some,
                    lr=rate,
                    betas=(0.9, 0.95),
                    weight_decay=0.0,
                    capturable=model.device.type == "cuda",
                )
            )
    for group in (g for one in found for g in one.param_groups):
        group["peak"], group["lr"] = group["lr"], torch.tensor(group["lr"], device=model.device)
    return found


def lr_factor(step: int, steps: int) -> float:
    """Warm-up over 50 steps or a tenth, then a cosine to 10 %."""
    warm = max(1, min(50, steps // 10))
    return min(1.0, (step + 1) / warm) * (
        0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))
    )


class Step:
    """One optimizer step on a batch; returns the loss and the share of answer tokens right, not
    waited for.

    On a GPU, steps after the first few of a batch shape are replayed from a CUDA graph: launching
    the kernels of a model this small takes Python about as long as running them. All work is on a
    stream of its own, `stream`.
    """

    WARM = 3  # steps not captured: kernels are compiled in them, optimizers make their state

    def __init__(
        self,
        model: LlamaForCausalLM,
        opts: list[torch.optim.Optimizer],
        device: str,
        teacher: LlamaForCausalLM | None,
    ) -> None:
        self.model, self.opts, self.device, self.teacher = model, opts, device, teacher
        self.trained = [p for one in opts for group in one.param_groups for p in group["params"]]
        self.stream = torch.cuda.Stream() if device.startswith("cuda") else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: tuple[Tensor, ...] = ()
        self._found: tuple[Tensor, ...] = ()
        self._warm, self._captures = 0, self.stream is not None

    def __call__(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        if self._given and self._given[0].shape != ids.shape:
            self._graph, self._given, self._found = None, (), ()
        if not self._given:
            self._warm, self._given = self.WARM, (ids.to(self.device), weights.to(self.device))
        for held, given in zip(self._given, (ids, weights)):
            held.copy_(given, non_blocking=True)
        if self._warm or not self._captures:
            self._warm -= bool(self._warm)
            return self._run()
        if self._graph is None:
            self._capture()
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._found[0].clone(), self._found[1].clone()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """All that is done within goes to `stream`, after what was before and before what comes
        after."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self.stream)

    def _run(self) -> tuple[Tensor, Tensor]:
        ids, weights = self._given
        loss, right = loss_backward(self.model, ids.long(), weights, self.device, self.teacher)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        for one in self.opts:
            one.step()
            one.zero_grad(set_to_none=True)
        return loss, right

    def _capture(self) -> None:
        """Capture a step; nothing runs yet. Where that cannot be, steps stay as they are."""
        graph = torch.cuda.CUDAGraph()
        try:  # "thread_local": meanwhile the loader's thread takes pinned memory
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self._found = self._run()
            self._graph = graph
        except RuntimeError as error:
            warnings.warn(
                f"a step cannot be captured, so all run as they are, which is slower: {error}",
                stacklevel=2,
            )
            self._captures = False
            for one in self.opts:
                one.zero_grad(set_to_none=True)
