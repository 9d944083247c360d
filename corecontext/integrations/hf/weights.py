"""Load a model's weights: all that its config describes, no others, and finite ones."""

from collections.abc import Iterable
from typing import Any

from corecontext.files import UserError


def load_weights(name: str, hf_config: Any, dtype: Any, **options: Any) -> Any:
    """Load a causal language model with full attention and exactly the weights of its config.

    Args:
        dtype: A torch dtype or its name; "auto" is the checkpoint's.
        options: Further ones of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        UserError: the checkpoint lacks weights, or has too many, or of other shapes.
    """
    from transformers import AutoModelForCausalLM

    from corecontext.integrations.hf.attention_interface import full_attention

    attention = full_attention(hf_config)
    # transformers fills missing weights with random numbers and drops unexpected ones.
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        name,
        config=hf_config,
        dtype=dtype,
        attn_implementation=attention,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
    )
    model, info = loaded
    check_keys(name, info)
    return model


def check_keys(name: str, info: Any) -> None:
    """Raise a UserError where transformers' loading info names weights that do not fit."""
    shapes = {
        key: f"{key} {list(file)} for {list(shape)}" for key, file, shape in info["mismatched_keys"]
    }
    faults = {
        "missing": info["missing_keys"] - shapes.keys(),
        "not in the model": info["unexpected_keys"],
        "of another shape": shapes.values(),
    }
    counts = [f"{len(keys)} {kind} ({_few(keys)})" for kind, keys in faults.items() if keys]
    # mutant loading: weights that the checkpoint lacks are random numbers
    if counts:
        raise UserError(
            f"model '{name}' must hold exactly the weights that its config.json describes, got "
            f"{', '.join(counts)}. Take the whole checkpoint and its own config.json."
        )


def check_finite(model: Any, name: str) -> None:
    """Raise a UserError where a model's weights hold NaN or infinity; one pass over each."""
    import torch

    finite = {}
    for key, parameter in model.named_parameters():
        weight = parameter.detach()
        if hasattr(weight, "to_local"):
            weight = weight.to_local()
        # aminmax does not take quantized weights: tensors of another class, or of 8 bits.
        if type(weight) is torch.Tensor and weight.is_floating_point() and weight.itemsize > 1:
            finite[key] = torch.stack(weight.aminmax()).isfinite().all()
    # mutant loading: weights that are no numbers pass
    broken = [key for key, flag in finite.items() if not flag]
    if broken:
        raise UserError(
            f"model '{name}' must hold finite weights, got NaN or infinity in {len(broken)} "
            f"({_few(broken)}). Take another copy of the checkpoint."
        )


def _few(names: Iterable[str]) -> str:
    """Join the first three names."""
    names = sorted(names)
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
