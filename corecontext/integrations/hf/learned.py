"""Add learned parameters of core tokens to a Hugging Face model, load them, and remove them.

They are parameters `...self_attn.cca.NAME` of the model, so optimizers, `save_pretrained` and
checkpoints include them. transformers skips them when it loads a checkpoint, since its classes do
not have them; `enable` reads them then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from corecontext.model_sizes import ModelSizes
from corecontext.ops.rules import Learned, shapes

NAME = "cca"
"""Of the submodule that holds the parameters, and of the settings in a model's config."""


def add_learned(
    model: PreTrainedModel,
    modules: Sequence[nn.Module],
    names: tuple[str, ...],
    is_trained: bool,
    rank: int = 0,
    processes: int = 1,
) -> None:
    """Give each attention module its parameters: zero, or as in the model's checkpoint.

    Args:
        model: The model that `modules` belong to.
        names: Of CCAConfig.learned.
        is_trained: Whether the checkpoint's settings name the same parameters; their values are
            then loaded.
        rank, processes: Of tensor parallelism; a process has the parameters of its heads.

    Raises:
        ValueError: the checkpoint cannot be found or lacks them.
    """
    if not names:
        return
    checkpoint = model.config._name_or_path
    saved = read_learned(checkpoint) if is_trained else {}
    sizes = ModelSizes.of(model.config)
    paths = {id(module): path for path, module in model.named_modules()}
    added = []
    for module in modules:
        weight = next(module.parameters())
        dtype = weight.dtype if weight.is_floating_point() else torch.float32
        parameters = {}
        sizes_of = shapes(names, sizes.query_heads, sizes.kv_heads, module.head_dim)
        for name, shape in sizes_of.items():
            value = torch.zeros(shape, dtype=dtype, device=weight.device)
            if is_trained:
                key = f"{paths[id(module)]}.{NAME}.{name}"
                if key not in saved or saved[key].shape != shape:
                    got = list(saved[key].shape) if key in saved else "none"
                    raise ValueError(
                        f"checkpoint {checkpoint!r} must hold the learned parameter {key!r} "
                        f"{list(shape)} that its settings name, got {got}. To start anew, enable "
                        "with another config after `del model.config.cca`."
                    )
                value.copy_(saved[key])
            parameters[name] = nn.Parameter(value.chunk(processes)[rank].clone())
        added.append(nn.ParameterDict(parameters))
    # After the last check, so that a model that is refused stays as it was.
    for module, parameters_of_module in zip(modules, added):
        module.add_module(NAME, parameters_of_module)


def learned_of(module: nn.Module) -> Learned:
    """Return an attention module's learned parameters, by name."""
    return dict(getattr(module, NAME, {}))


def remove_learned(modules: Sequence[nn.Module]) -> None:
    """Remove the parameters from the model."""
    for module in modules:
        module._modules.pop(NAME, None)


def read_learned(name_or_path: str) -> dict[str, Tensor]:
    """Return all learned parameters in a checkpoint's safetensors files, by their full names."""
    if not name_or_path:
        return {}
    options = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    files = {"model.safetensors"}
    index = cached_file(name_or_path, "model.safetensors.index.json", **options)
    if index is not None:
        with open(index, encoding="utf-8") as file:
            weight_map = json.load(file)["weight_map"]
        files = {name for key, name in weight_map.items() if f".{NAME}." in key}

    values: dict[str, Tensor] = {}
    for file in sorted(files):
        path = cached_file(name_or_path, file, **options)
        if path is None:
            continue
        with safe_open(path, "pt") as tensors:
            keys = [key for key in tensors.keys() if f".{NAME}." in key]  # noqa: SIM118
            values |= {key: tensors.get_tensor(key) for key in keys}
    return values
