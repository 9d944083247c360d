"""The miniature's models: random weights, their attention, LoRA, and the loss of every token of
some rows."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from corecontext import baselines
from corecontext.files import UserError
from reproduction.plan import Size

HEAD_TOKENS = 8192
"""Tokens whose logits exist at once."""


def make_model(size: Size, vocab_size: int, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights."""
    config = LlamaConfig(
        vocab_size=-(-vocab_size // 8) * 8,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=8 * size.length,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def attention(model: LlamaForCausalLM, config: Any) -> contextlib.AbstractContextManager:
    """The model under a method's settings; None is full attention."""
    return contextlib.nullcontext() if config is None else baselines.enabled(model, config)


def add_lora(model: LlamaForCausalLM, seed: int = 0) -> None:
    """LoRA's factors beside all attention projections, as `corecontext train --strategy lora` has
    them.

    Raises:
        UserError: peft is not installed.
    """
    try:
        import peft
    except ImportError:
        raise UserError("LoRA needs the package peft. Install corecontext[train].") from None
    from corecontext.train.train_config import TrainConfig

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(
            peft.LoraConfig(
                r=TrainConfig.lora_rank,
                lora_alpha=TrainConfig.lora_alpha,
                target_modules=list(TrainConfig.lora_targets),
            ),
            model,
        )
    model.to(model.device)


def merge_lora(model: LlamaForCausalLM) -> None:
    """The factors become part of the weights."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.merge()


def autocast(device: str) -> contextlib.AbstractContextManager:
    """bfloat16 on a GPU."""
    return (
        torch.autocast("cuda", torch.bfloat16)
        if device.startswith("cuda")
        else contextlib.nullcontext()
    )


def hidden_states(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """[B, L - 1, C], without a cache.

    The layers one after the other, as transformers runs them, but for its search for packed
    documents: rows here are one sequence each, and an answer from the GPU is what a captured step
    cannot wait for.
    """
    inner = model.model
    hidden = inner.embed_tokens(ids[:, :-1])
    rotation = inner.rotary_emb(
        hidden, position_ids=torch.arange(hidden.shape[1], device=ids.device)[None]
    )
    for layer in inner.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotation)
    return inner.norm(hidden)


def losses(weight: Tensor, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihoods [n] in nats and whether the target was the likeliest, of hidden
    states [n, C]."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, target, reduction="none"), logits.detach().argmax(-1) == target


def nll_of(model: LlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of every token but the first, and whether it was the likeliest: [B, L
    - 1]."""
    hidden, target = hidden_states(model, ids).flatten(0, 1), ids[:, 1:].flatten()
    parts = [
        losses(model.lm_head.weight, h, t)
        for h, t in zip(hidden.split(HEAD_TOKENS), target.split(HEAD_TOKENS))
    ]
    return tuple(torch.cat(one).view(ids.shape[0], -1) for one in zip(*parts))  # type: ignore[return-value]
