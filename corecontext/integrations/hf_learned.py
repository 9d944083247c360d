"""Learned parameters of core tokens as parameters of a Hugging Face model: added, found in a
checkpoint, taken away.

They are called `...self_attn.cca.NAME`, so optimizers, `save_pretrained` and checkpoints have them
like any other. transformers itself leaves them out when it loads, since its classes do not know
them; `enable` reads them then.
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
from corecontext.ops.rules import shapes

NAME = "cca"


def add_learned(
    model: PreTrainedModel,
    modules: Sequence[nn.Module],
    names: tuple[str, ...],
    trained: bool,
    rank: int = 0,
    processes: int = 1,
) -> None:
    """Give each attention module its parameters: zero, or as the model's checkpoint has them.

    Args:
        model: The model that `modules` belong to.
        names: Of CCAConfig.learned.
        trained: The checkpoint's settings name the same parameters, so its values are to be taken.
        rank, processes: Which one of those that share each layer's heads this is; it has the
            parameters of its heads.

    Raises:
        ValueError: the checkpoint cannot be found or lacks them.
    """
    if not names:
        return
    sizes = ModelSizes.of(model.config)
    paths = {id(module): path for path, module in model.named_modules()}
    values: dict[str, Tensor] = {}
    if trained:
        values = read_learned(model.config._name_or_path)
    for module in modules:
        like, found = next(module.parameters()), {}
        for name, shape in shapes(
            names, sizes.query_heads, sizes.kv_heads, module.head_dim
        ).items():
            value = torch.zeros(
                shape,
                dtype=like.dtype if like.is_floating_point() else torch.float32,
                device=like.device,
            )
            if trained:
                key = f"{paths[id(module)]}.{NAME}.{name}"
                held = values.get(key)
                if held is None or held.shape != value.shape:
                    raise ValueError(
                        f"checkpoint '{model.config._name_or_path}' must hold the learned parameter "
                        f"{key!r} {list(shape)} that its settings name, got "
                        f"{'none' if held is None else list(held.shape)}. To start anew, enable with "
                        "another config after `del model.config.cca`."
                    )
                value.copy_(held)
            found[name] = nn.Parameter(value.chunk(processes)[rank].clone())
        module.add_module(NAME, nn.ParameterDict(found))


def remove_learned(modules: Sequence[nn.Module]) -> None:
    """Take the parameters away again."""
    for module in modules:
        if NAME in module._modules:
            del module._modules[NAME]


def read_learned(name_or_path: str) -> dict[str, Tensor]:
    """All learned parameters in a checkpoint's safetensors files, by name."""
    options = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    files = set()
    index = (
        cached_file(name_or_path, "model.safetensors.index.json", **options)
        if name_or_path
        else None
    )
    if index is not None:
        with open(index, encoding="utf-8") as file:
            files = {
                where for key, where in json.load(file)["weight_map"].items() if f".{NAME}." in key
            }
    elif name_or_path:
        files = {"model.safetensors"}
    found: dict[str, Tensor] = {}
    for file in sorted(files):
        path = cached_file(name_or_path, file, **options)
        if path is None:
            continue
        with safe_open(path, "pt") as tensors:
            found |= {key: tensors.get_tensor(key) for key in tensors.keys() if f".{NAME}." in key}
    return found
