"""Make the miniature's models: random weights, attention, LoRA, and losses of every token."""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from corecontext import baselines
from corecontext.files import UserError
from reproduction.sizes import Size

HEAD_TOKENS = 8192
"""Tokens whose logits exist at once."""


def make_model(size: Size, vocab_size: int, seed: int) -> LlamaForCausalLM:
    """Make a Llama with random weights."""
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


def given_model(folder: str) -> LlamaForCausalLM:
    """Load a Llama under full attention in float32, whatever attention its config names."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def attention(model: LlamaForCausalLM, config: Any) -> contextlib.AbstractContextManager:
    """Put the model under a method's settings for a with block; None is full attention."""
    return contextlib.nullcontext() if config is None else baselines.enabled(model, config)


def add_lora(model: LlamaForCausalLM, seed: int = 0) -> None:
    """Add LoRA's factors to all attention projections, as `corecontext train --strategy lora`.

    Raises:
        UserError: peft is not installed.
    """
    try:
        import peft
    except ImportError:
        raise UserError("LoRA needs the package peft. Install it with: pip install peft") from None
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
    """Merge the factors into the weights."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.merge()


def autocast(device: str) -> contextlib.AbstractContextManager:
    """Compute in bfloat16 on a GPU."""
    if device.startswith("cuda"):
        return torch.autocast("cuda", torch.bfloat16)
    return contextlib.nullcontext()


def hidden_states(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return hidden states [B, L - 1, C], without a cache.

    Layer by layer as in transformers, except for its search for packed documents: rows here are
    one sequence each, and a captured step cannot wait for an answer from the GPU.
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
    """Return negative log-likelihoods [n] in nats, and whether the target was the likeliest.

    Args:
        hidden: [n, C].
    """
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, target, reduction="none"), logits.detach().argmax(-1) == target


def nll_of(model: LlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of every token but the first, and whether it was the
    likeliest: [B, L - 1] each."""
    hidden = hidden_states(model, ids).flatten(0, 1).split(HEAD_TOKENS)
    target = ids[:, 1:].flatten().split(HEAD_TOKENS)
    chunks = [losses(model.lm_head.weight, h, t) for h, t in zip(hidden, target)]
    nll, right = (torch.cat(chunk).view(ids.shape[0], -1) for chunk in zip(*chunks))
    return nll, right
