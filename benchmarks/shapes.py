"""Make models to measure: known shapes with random weights, or a checkpoint."""

from typing import Any, NamedTuple

import torch

from corecontext.model_sizes import ModelSizes


class ModelShape(NamedTuple):
    """Sizes of a model; the values of its weights do not change the time of a step."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


SHAPES = {
    "llama2-7b": ModelShape("llama", 4096, 11008, 32, 32, 32, 32_000),
    "llama3.1-8b": ModelShape("llama", 4096, 14336, 32, 32, 8, 128_256),
    "qwen2.5-7b": ModelShape("qwen2", 3584, 18944, 28, 28, 4, 152_064),
    "qwen3-8b-kv4": ModelShape("qwen3", 4096, 12288, 36, 32, 4, 151_936),
    "smollm2-135m-instruct": ModelShape("llama", 576, 1536, 30, 9, 3, 49_152),
    "llama-1b": ModelShape("llama", 2048, 8192, 16, 16, 8, 32_000),
    "tiny": ModelShape("llama", 128, 256, 2, 4, 2, 512),
}
POSITIONS = 2**21
ROTARY = {"rope_type": "default", "rope_theta": 500000.0}


def shape_config(shape: str, **options: Any) -> Any:
    """Return the Hugging Face config of a name of SHAPES, without special tokens."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        **SHAPES[shape]._asdict(),
        rope_parameters=ROTARY,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        **options,
    )


def make_model(shape: str, dtype: str, device: str) -> tuple[Any, dict[str, Any]]:
    """Return the model and its params in records.

    Args:
        shape: A name of SHAPES, or a checkpoint's folder, GGUF file, name or identifier.

    Raises:
        UserError: a checkpoint is missing, broken or of an unsupported architecture.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from corecontext.integrations.hf.attention_interface import full_attention
    from corecontext.integrations.hf.gguf_files import local_model
    from corecontext.loading import check_architecture, load_config, one_line

    logging.set_verbosity_error()
    torch_dtype = getattr(torch, dtype)
    if shape in SHAPES:
        config = shape_config(shape, max_position_embeddings=POSITIONS, dtype=torch_dtype)
        devices = [device] if torch.device(device).type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=torch_dtype, attn_implementation="sdpa"
                ).eval()
    else:
        shape = local_model(shape)  # a GGUF file is unpacked
        config = load_config(shape)
        check_architecture(config)
        with one_line(f"model '{shape}' cannot be loaded"):
            model = AutoModelForCausalLM.from_pretrained(
                shape, dtype=torch_dtype, attn_implementation=full_attention(config)
            )
        model.to(torch.device(device)).eval()  # type: ignore[arg-type]
        config.dtype = torch_dtype
    model.generation_config.eos_token_id = None  # no request ends early
    return model, {
        "shape": shape.rstrip("/").split("/")[-1],
        "weights": "random" if shape in SHAPES else "checkpoint",
        **ModelSizes.of(config)._asdict(),
        "dtype": dtype,
    }


def make_prompt(model: Any, batch: int, length: int) -> torch.Tensor:
    """Return random tokens [B, L]."""
    generator = torch.Generator(model.device).manual_seed(length)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(2, vocabulary, (batch, length), device=model.device, generator=generator)
