"""Add the matrices of a LoRA adapter to the weights of a Hugging Face model."""

import json
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from corecontext.files import UserError, one_line

BUNDLED = {"smollm2": "smollm2_fetch"}
"""Folders of adapters below corecontext/assets/, by their models' names in commands."""
FOLDERS = {"smollm2-135m-instruct": "smollm2"}
"""Names in commands, by the beginning of a model's folder name or name on the hub, in lower
case."""
ASSETS = Path(__file__).resolve().parents[2] / "assets"
OTHER_FORMULAS = ("use_rslora", "use_dora", "alpha_pattern", "rank_pattern")
"""Settings of PEFT under which a layer's change is another than (lora_alpha / r) B A."""


def add_adapter(model: nn.Module, folder: str | Path) -> None:
    """Add an adapter to a model's weights, in place: W + (lora_alpha / r) B A for each layer, of
    matrices A [r, in] ("down") and B [out, r] ("up").

    Args:
        model: The model that the adapter was trained on, as it is.
        folder: Folder with PEFT's adapter_config.json and adapter_model.safetensors, or "smollm2"
            for the one in this package, trained under fetch.

    Raises:
        UserError: the adapter is missing or damaged, is of another kind, or is not for this model.
    """
    if str(folder) in BUNDLED:
        folder = ASSETS / BUNDLED[str(folder)]
    folder = Path(folder)
    with one_line(f"adapter '{folder}' cannot be read"):
        scale, matrices = _read_adapter(folder)
    weights = dict(model.named_parameters())
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


def _read_adapter(folder: Path) -> tuple[float, dict[str, Tensor]]:
    """Return the scale of an adapter's changes, and its matrices by name."""
    from safetensors.torch import load_file

    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        matrices = load_file(folder / "adapter_model.safetensors")
    except OSError:
        raise UserError(
            f"adapter '{folder}' must be a folder with adapter_config.json and "
            "adapter_model.safetensors, got none."
        ) from None
    unsupported = [name for name in OTHER_FORMULAS if settings.get(name)]
    unsupported += [name for name in matrices if not re.search(r"\.lora_[AB]\.", name)]
    if unsupported:
        raise UserError(
            f"adapter '{folder}' must be plain LoRA, got {', '.join(unsupported[:3])}. Merge it "
            "into its model with PEFT (merge_and_unload), save that model, and load it."
        )
    return settings["lora_alpha"] / settings["r"], matrices


def find_adapter(model: str) -> str | None:
    """Return the name of the package's adapter for a model, or None.

    Args:
        model: A name that commands take, a folder, a GGUF file or an identifier on the hub.
    """
    given = Path(model).name.lower()
    name = next((FOLDERS[start] for start in FOLDERS if given.startswith(start)), given)
    is_bundled = name in BUNDLED and (ASSETS / BUNDLED[name] / "adapter_config.json").is_file()
    return name if is_bundled else None
