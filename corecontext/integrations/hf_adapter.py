"""Add the matrices of a LoRA adapter to the weights of a Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from corecontext.files import UserError

BUNDLED = {"smollm2": "smollm2_fetch"}
"""Adapters in the package, below corecontext/assets/, by model."""
ASSETS = Path(__file__).resolve().parent.parent / "assets"


def add_adapter(model: nn.Module, folder: str | Path) -> None:
    """Add an adapter to a model's weights, in place: W + scale B A for each of its layers.

    Args:
        model: The model that the adapter was trained on, as it is.
        folder: Folder with PEFT's adapter_config.json and adapter_model.safetensors, or "smollm2"
            for the one in this package, trained under fetch.

    Raises:
        UserError: the adapter is missing, or is not for this model.
    """
    from safetensors.torch import load_file

    if str(folder) in BUNDLED:
        folder = ASSETS / BUNDLED[str(folder)]
    folder = Path(folder)
    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        matrices = load_file(folder / "adapter_model.safetensors")
    except OSError:
        raise UserError(
            f"adapter '{folder}' must be a folder with adapter_config.json and "
            "adapter_model.safetensors, got none."
        ) from None
    weights = dict(model.named_parameters())
    scale = settings["lora_alpha"] / settings["r"]
    downs = [name for name in matrices if ".lora_A." in name]
    with torch.no_grad():
        for name in downs:
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            down = matrices[name].float()
            up = matrices[name.replace(".lora_A", ".lora_B")].float()
            weight = weights.get(target)
            if weight is None or weight.shape != (up.shape[0], down.shape[1]):
                raise UserError(
                    f"adapter '{folder}' must fit the model, got {tuple(up.shape)} and "
                    f"{tuple(down.shape)} for {target}. Take the model it was trained on."
                )
            change = scale * up.to(weight.device) @ down.to(weight.device)
            weight.copy_(weight.float() + change)


def find_adapter(model: str) -> str | None:
    """Return the name of the package's adapter for a model's folder, or None."""
    for name, folder in BUNDLED.items():
        is_model = Path(model).name.lower().startswith(name)
        if is_model and (ASSETS / folder / "adapter_config.json").is_file():
            return name
    return None
