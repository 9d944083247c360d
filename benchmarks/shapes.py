"""Models to measure: the shapes of known ones with random weights, made where they run, or a
checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from corecontext.model_sizes import ModelSizes

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2-7b": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32000,
        },
    ),
    "llama3.1-8b": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "qwen2.5-7b": (
        "qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
    "llama-1b": (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
        },
    ),
    "tiny": (
        "llama",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        },
    ),
}
"""Model type and sizes; what weights hold does not change how long a step takes."""
POSITIONS = 2**21
ROTARY = {"rope_type": "default", "rope_theta": 500000.0}


def make_model(shape: str, dtype: str, device: str) -> tuple[Any, dict[str, Any]]:
    """The model, and what records say of it.

    Args:
        shape: A name of SHAPES, or a checkpoint's folder or identifier.

    Raises:
        UserError: a checkpoint is missing, broken or of an unsupported architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from corecontext.integrations.transformers import full_attention
    from corecontext.loading import check_architecture, load_config, one_line

    logging.set_verbosity_error()
    wanted = getattr(torch, dtype)
    if shape in SHAPES:
        kind, sizes = SHAPES[shape]
        config = AutoConfig.for_model(
            kind,
            **sizes,
            max_position_embeddings=POSITIONS,
            rope_parameters=ROTARY,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            tie_word_embeddings=False,
            dtype=wanted,
        )
        with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
            torch.manual_seed(0)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=wanted, attn_implementation="sdpa"
                ).eval()
    else:
        config = load_config(shape)
        check_architecture(config)
        with one_line(f"model '{shape}' cannot be loaded"):
            model = AutoModelForCausalLM.from_pretrained(
                shape, dtype=wanted, attn_implementation=full_attention(config)
            )
        model.to(torch.device(device)).eval()  # type: ignore[arg-type]
        config.dtype = wanted
    model.generation_config.eos_token_id = (
        None  # every request makes as many tokens as it is to be timed for
    )
    return model, {
        "shape": shape.rstrip("/").split("/")[-1],
        "weights": "random" if shape in SHAPES else "checkpoint",
        **ModelSizes.of(config)._asdict(),
        "dtype": dtype,
    }


def make_prompt(model: Any, batch: int, length: int) -> torch.Tensor:
    """Random tokens [B, L]."""
    generator = torch.Generator(model.device).manual_seed(length)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(2, vocabulary, (batch, length), device=model.device, generator=generator)
