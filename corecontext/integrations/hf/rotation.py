"""Find how a Hugging Face model rotates its keys, by running its own rotary embedding."""

import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from corecontext.ops.rotary import Rotary

FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""Rope types of transformers whose frequencies do not depend on the length of the text."""
FIXED = "fixed"
"""Type of a rotary module whose frequencies `fix_rotation` has fixed."""


def rotates(attention: nn.Module) -> bool:
    """Whether an attention layer rotates its keys; some layers of SmolLM3 do not."""
    return bool(getattr(attention, "use_rope", True))


def layer_type_of(config: Any, layer_idx: int) -> str | None:
    """Return the kind of a layer, such as "full_attention", where a config tells layers apart."""
    types = getattr(config, "layer_types", None)
    return types[layer_idx] if types else None


def check_rope_type(config: Any, layer_type: str | None) -> None:
    """Raise NotImplementedError where layers of this kind have frequencies that change with
    length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(layer_type, parameters)
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in FIXED_ROPE_TYPES:
        raise NotImplementedError(
            f"rotary embedding {rope_type!r} changes its frequencies with the length, so pooled "
            f"keys have no fixed position. Fixed types: {', '.join(FIXED_ROPE_TYPES)}; or adapt "
            "the model with core_position='token' (`corecontext train --core-position token`)."
        )


def find_rotary(model: PreTrainedModel, attention: nn.Module, layer_idx: int) -> Rotary:
    """Return the rotation of one attention layer's keys.

    The frequencies are those of the model's rotary module at position 1. The layout, whether the
    columns of a pair are neighbours, is the one that agrees with `apply_rotary_pos_emb` of the
    model's own file.

    Raises:
        NotImplementedError: frequencies change with length, or no known layout reproduces the
            model's rotation.
    """
    layer_type = layer_type_of(model.config, layer_idx)
    check_rope_type(model.config, layer_type)
    module = getattr(model.base_model, "rotary_emb", None)
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if module is None or apply is None:
        raise NotImplementedError(
            f"{type(model).__name__} has no rotary_emb module or apply_rotary_pos_emb function. "
            "Use core_position='token'."
        )
    device = next(iter(module.buffers())).device
    x = torch.randn(
        1, 1, 3, attention.head_dim, device=device, generator=torch.Generator(device).manual_seed(0)
    )
    options = {}
    if "layer_type" in inspect.signature(module.forward).parameters:
        options = {"layer_type": layer_type}
    positions = torch.tensor([[0, 1, 7]], device=device)
    with torch.no_grad():
        cos, sin = module(x, positions, **options)
        _, rotated = apply(x, x, cos, sin)
        for interleaved in (False, True):
            # mutant plug-in: the rotary frequencies 20 % off
            angle = torch.atan2(sin[0, 1].double(), cos[0, 1].double())
            rotary = Rotary(angle[: angle.numel() // 2].float(), interleaved)
            # If the layout is right, the key at position 0, rotated by 7, is that at position 7.
            # Where the model also scales keys (YaRN), both are scaled.
            at_zero = apply(x[:, :, 2:], x[:, :, 2:], cos[:, :1], sin[:, :1])[1]
            if torch.allclose(
                rotary.rotate(at_zero, positions[0, 2:]), rotated[:, :, 2:], rtol=1e-4, atol=1e-4
            ):
                return rotary
    raise NotImplementedError(
        f"the rotary layout of {type(model).__name__} is not known. Use core_position='token'."
    )


# Frequencies that depend on the length


@contextlib.contextmanager
def rotation_of(model: Any, length: int | None) -> Iterator[None]:
    """Let a model rotate in the block as for a text of `length` tokens in one pass, whatever part
    of it is read; None, or a model of fixed frequencies, changes nothing."""
    module = _changing_rotary(model)
    if module is None or length is None:
        yield
        return
    attributes, buffers = dict(vars(module)), dict(module._buffers)
    try:
        fix_rotation(model, length)
        yield
    finally:
        module._buffers.clear()
        module._buffers.update(buffers)
        vars(module).clear()
        vars(module).update(attributes)


def fix_rotation(model: Any, length: int) -> None:
    """Let a model rotate as it rotates a text of `length` tokens, from now on."""
    module = _changing_rotary(model)
    if module is None:
        return
    for name in ("", *(f"{kind}_" for kind in _kinds(module) if kind)):
        # Undo what an earlier, longer text has changed.
        if (first := getattr(module, f"{name}original_inv_freq", None)) is not None:
            buffer = f"{name}inv_freq"
            module._buffers[buffer] = first.to(module._buffers[buffer].device).clone()
            setattr(module, f"{name}max_seq_len_cached", module.original_max_seq_len)
    # A call for the last position sets the frequencies.
    device = next(iter(module.buffers())).device
    for kind in _kinds(module):
        options = {} if kind is None else {"layer_type": kind}
        position = torch.full((1, 1), length - 1, device=device)
        module(torch.zeros(1, 1, 1, device=device), position, **options)
    if isinstance(module.rope_type, str):
        module.rope_type = FIXED
    else:
        module.rope_type = dict.fromkeys(module.rope_type, FIXED)


def rotated_length(model: Any, lengths: Sequence[int]) -> int | None:
    """Return the length by which the rows of a batch are rotated; None where no length matters.

    Raises:
        ValueError: texts of these lengths have different frequencies.
    """
    module = _changing_rotary(model)
    if module is None:
        return None
    frequencies = []
    for length in (min(lengths), max(lengths)):
        with rotation_of(model, length):
            frequencies.append([buffer.clone() for buffer in module.buffers()])
    if not all(map(torch.equal, *frequencies)):
        raise ValueError(
            "rows must be of one length where the rotation depends on it, got "
            f"{min(lengths)} to {max(lengths)} tokens. Run them one by one."
        )
    return max(lengths)


def _kinds(module: nn.Module) -> list[str | None]:
    """Return the kinds of layers of a rotary module; [None] where it does not tell them apart."""
    return [None] if isinstance(module.rope_type, str) else list(module.rope_type)


def _changing_rotary(model: Any) -> Any:
    """Return a model's rotary module where its frequencies change with the length, else None."""
    module = getattr(getattr(model, "base_model", None), "rotary_emb", None)
    kinds = getattr(module, "rope_type", None)
    if not isinstance(kinds, (str, dict)):
        return None
    types = [kinds] if isinstance(kinds, str) else kinds.values()
    fixed = (*FIXED_ROPE_TYPES, FIXED)
    return None if all(kind in fixed for kind in types) else module
