"""The miniature's training: one plain loop for base models, adaptations and training from scratch; it can be cut short.

Muon for the layers' matrices, AdamW for the rest, a cosine to a tenth. Half of the rows are text, the others ask for
facts planted in text or in passages; contexts grow, because retrieval is learned at short ones first.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from corecontext import baselines
from corecontext.inference.fuse import compiled_or_plain
from corecontext.reproduce.corpus import Batches, Corpus
from corecontext.reproduce.muon import Muon
from corecontext.reproduce.plan import Method, Size
from corecontext.terminal import progress
from corecontext.text import UserError, atomic_path

SAVE_EVERY_S = 60.0
HEAD_TOKENS = 8192
"""Tokens whose logits exist at once."""


class OutOfTime(Exception):
    """The invocation's time is over; what was trained is saved."""


def make_model(size: Size, vocab_size: int, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights."""
    config = LlamaConfig(vocab_size=-(-vocab_size // 8) * 8, hidden_size=size.hidden, intermediate_size=size.ffn,
                         num_hidden_layers=size.layers, num_attention_heads=size.heads,
                         num_key_value_heads=size.kv_heads, max_position_embeddings=8 * size.length,
                         rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, tie_word_embeddings=True,
                         bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def attention(model: LlamaForCausalLM, config: Any) -> contextlib.AbstractContextManager:
    """The model under a method's settings; None is full attention."""
    return contextlib.nullcontext() if config is None else baselines.enabled(model, config)


def add_lora(model: LlamaForCausalLM, seed: int = 0) -> None:
    """LoRA's factors beside all attention projections, as `corecontext train --strategy lora` has them.

    Raises:
        UserError: peft is not installed.
    """
    try:
        import peft
    except ImportError:
        raise UserError("LoRA needs the package peft. Install corecontext[train].") from None
    from corecontext.train.config import TrainConfig

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(peft.LoraConfig(r=TrainConfig.lora_rank, lora_alpha=TrainConfig.lora_alpha,
                                                     target_modules=list(TrainConfig.lora_targets)), model)
    model.to(model.device)


def merge_lora(model: LlamaForCausalLM) -> None:
    """The factors become part of the weights."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.merge()


def autocast(device: str) -> contextlib.AbstractContextManager:
    """bfloat16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.startswith("cuda") else contextlib.nullcontext()


def hidden_states(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """[B, L - 1, C], without a cache.

    The layers one after the other, as transformers runs them, but for its search for packed documents: rows here are
    one sequence each, and an answer from the GPU is what a captured step cannot wait for.
    """
    inner = model.model
    hidden = inner.embed_tokens(ids[:, :-1])
    rotation = inner.rotary_emb(hidden, position_ids=torch.arange(hidden.shape[1], device=ids.device)[None])
    for layer in inner.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotation)
    return inner.norm(hidden)


def losses(weight: Tensor, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihoods [n] in nats and whether the target was the likeliest, of hidden states [n, C]."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, target, reduction="none"), logits.detach().argmax(-1) == target


def nll_of(model: LlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of every token but the first, and whether it was the likeliest: [B, L - 1]."""
    hidden, target = hidden_states(model, ids).flatten(0, 1), ids[:, 1:].flatten()
    parts = [losses(model.lm_head.weight, h, t) for h, t in zip(hidden.split(HEAD_TOKENS), target.split(HEAD_TOKENS))]
    return tuple(torch.cat(one).view(ids.shape[0], -1) for one in zip(*parts))  # type: ignore[return-value]


def head_loss(weight: Tensor, hidden: Tensor, target: Tensor, weights: Tensor, teacher: Tensor | None = None,
              taught: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The weighted sum of the losses of hidden states [n, C], and how many answer tokens (weight above one) are right.

    With a teacher's head and hidden states half of the loss is the divergence from its predictions.
    """
    logits = F.linear(hidden, weight)
    nll = F.cross_entropy(logits.float(), target, reduction="none")
    if teacher is not None and taught is not None:
        wanted = F.linear(taught, teacher).float().log_softmax(-1)
        far = F.kl_div(logits.float().log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
        nll = 0.5 * nll + 0.5 * far
    return (nll * weights).sum(), ((logits.detach().argmax(-1) == target) & (weights > 1)).sum()


@functools.cache
def _fused_head() -> Callable[..., tuple[Tensor, Tensor]]:
    """`head_loss` compiled: of the logits, 16,384 numbers for each token, no copies in float32 are written."""
    return compiled_or_plain(head_loss, "head_loss")


def loss_backward(model: LlamaForCausalLM, ids: Tensor, weights: Tensor, device: str,
                  teacher: LlamaForCausalLM | None) -> tuple[Tensor, Tensor]:
    """Gradients of the weighted mean loss, its value, and the share of answer tokens right; nothing waits for the GPU.

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
            loss, hits = head(model.lm_head.weight, leaf.flatten(0, 1)[part], target[part], weights[part], *given)
            loss = loss / total
        loss.backward()
        found, right = found + loss.detach(), right + hits
    hidden.backward(leaf.grad)
    return found, right / (weights > 1).sum().clamp(min=1)


@contextlib.contextmanager
def half_stream(model: LlamaForCausalLM, device: str) -> Iterator[None]:
    """What goes from layer to layer is bfloat16 on a GPU, as in a model of that dtype: autocast alone leaves it
    float32, as the weights of embedding and norms are, which is twice the bytes and a copy before every product."""
    wanted = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)
              or type(module).__name__.endswith("RMSNorm")] if device.startswith("cuda") else []
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
    """Muon for the matrices of the layers, AdamW for the rest (LoRA's factors too); of what is trained.

    Rates are tensors beside the weights, so that a captured step reads what they are then.
    """
    wanted = {"all": ("",), "qkv": ("q_proj", "k_proj", "v_proj", ".cca."), "lora": ("lora_",)}[trains]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(one in name for one in wanted))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in named.items() if p.dim() == 2 and ".layers." in name
                and not any(one in name for one in (".cca.", "lora_"))]
    chosen = {id(p) for p in matrices}
    few = [p for name, p in named.items() if ".cca." in name]
    chosen |= {id(p) for p in few}
    rest = [p for p in named.values() if id(p) not in chosen]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    for some, rate in ((rest, lr), (few, 10 * lr)):  # few start at zero and have a short time to go far
        if some:
            found.append(torch.optim.AdamW(some, lr=rate, betas=(0.9, 0.95), weight_decay=0.0,
                                           capturable=model.device.type == "cuda"))
    for group in (g for one in found for g in one.param_groups):
        group["peak"], group["lr"] = group["lr"], torch.tensor(group["lr"], device=model.device)
    return found


def lr_factor(step: int, steps: int) -> float:
    """Warm-up over 50 steps or a tenth, then a cosine to 10 %."""
    warm = max(1, min(50, steps // 10))
    return min(1.0, (step + 1) / warm) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps)))))


class Step:
    """One optimizer step on a batch; returns the loss and the share of answer tokens right, not waited for.

    On a GPU, steps after the first few of a batch shape are replayed from a CUDA graph: launching the kernels of a
    model this small takes Python about as long as running them. All work is on a stream of its own, `stream`.
    """

    WARM = 3  # steps not captured: kernels are compiled in them, optimizers make their state

    def __init__(self, model: LlamaForCausalLM, opts: list[torch.optim.Optimizer], device: str,
                 teacher: LlamaForCausalLM | None) -> None:
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
        """All that is done within goes to `stream`, after what was before and before what comes after."""
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
            warnings.warn(f"a step cannot be captured, so all run as they are, which is slower: {error}", stacklevel=2)
            self._captures = False
            for one in self.opts:
                one.zero_grad(set_to_none=True)


def train(model: LlamaForCausalLM, corpus: Corpus, method: Method, levels: tuple[tuple[int, int], ...],
          step_tokens: int, lr: float, seed: int, device: str, folder: Path, *,
          teacher: LlamaForCausalLM | None = None, workers: int = 0, time_left: Callable[[], float] = lambda: math.inf,
          on_level: Callable[[int], Any] = lambda length: None,
          on_step: Callable[[int], dict[str, float]] = lambda step: {}) -> list[dict[str, Any]]:
    """Train under a method, from where `folder` was left.

    Args:
        model: With the method's attention enabled by the caller.
        levels: Contexts with the steps at each.
        step_tokens: Tokens of a step.
        folder: state.pt is kept here until the end.
        time_left: Seconds; OutOfTime is raised, with everything saved, when there are none.
        on_level: Called with the context whenever one is done with.
        on_step: Called with the number of steps done; what it returns joins that step's entry.

    Returns:
        One entry a step: step, length, tokens so far, loss, share of answer tokens right.
    """
    model.train()
    opts = optimizers(model, lr, method.trains)
    run = Step(model, opts, device, teacher)
    state_file, history = folder / "state.pt", []
    level, step, steps = 0, 0, sum(count for _, count in levels)
    if state_file.exists():
        state = torch.load(state_file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for one, saved in zip(opts, state["opts"]):
            one.load_state_dict(saved)
        level, step, history = state["level"], state["step"], state["history"]

    waiting: list[tuple[dict[str, Any], Tensor, Tensor]] = []

    def settle(keep: int = 0) -> None:
        """Read the results of all steps but the last few, so that the GPU always has something to do."""
        while len(waiting) > keep:
            entry, loss, right = waiting.pop(0)
            if not math.isfinite(loss):
                raise RuntimeError(f"training {folder.name} diverged at step {entry['step']}. Take a smaller rate.")
            history.append({**entry, "loss": round(float(loss), 5), "right": round(float(right), 4)})

    def save() -> None:
        settle()
        with atomic_path(state_file) as name:
            torch.save({"model": model.state_dict(), "opts": [one.state_dict() for one in opts], "level": level,
                        "step": step, "history": history}, name)

    saved_at, tokens = time.monotonic(), history[-1]["tokens"] if history else 0
    with half_stream(model, device), run.on_stream(), progress(f"train {folder.name}", steps) as advance:
        advance(step)
        while level < len(levels):
            length, most = levels[level]
            rows = max(1, step_tokens // length)
            done = sum(one["level"] == level for one in history)
            loader = torch.utils.data.DataLoader(
                Batches(corpus, seed, length, rows), batch_size=None, sampler=range(step, step + most - done),
                num_workers=workers, multiprocessing_context="fork" if workers else None,
                pin_memory=device.startswith("cuda"))
            for ids, weights in loader:
                if time_left() <= 0:
                    save()
                    raise OutOfTime(folder.name)
                spent = sum(count for _, count in levels[:level]) + done
                for group in (g for one in opts for g in one.param_groups):
                    group["lr"].fill_(group["peak"] * lr_factor(spent, steps))
                loss, right = run(ids, weights)
                step, done, tokens = step + 1, done + 1, tokens + ids.numel()
                waiting.append(({"step": step, "level": level, "length": length, "tokens": tokens, **on_step(step)},
                                loss, right))
                settle(keep=1)
                advance(1)
                if time.monotonic() - saved_at > SAVE_EVERY_S:
                    save()
                    saved_at = time.monotonic()
            del loader
            settle()
            on_level(length)
            level += 1
    model.eval()
    return history

