"""Train each layer's attention by itself: under an attention, on the hidden states of the model
under full attention, to give the same outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from corecontext.integrations.hf.attention_interface import full_layers, inner_model
from reproduction.real_attention import tokens_of
from reproduction.real_texts import Window


def match_layers(student: Any, teacher: Any, windows: list[Window], adaptation: Any) -> None:
    """Train the attention layers of a model for `layer_steps` steps; all other weights stay.

    The loss of a layer is the squared error of its output over that of zeros, as the mean over
    windows. The rate falls linearly to 0.

    Args:
        student: The model, with the attention in place.
        teacher: The model as it was, under full attention, frozen.
        windows: Training text, `rows` windows a step.
        adaptation: An `Adaptation`.
    """
    layers = full_layers_of(student)
    weights = [weight for layer in layers for weight in layer.parameters()]
    steps, rows, at_once = adaptation.layer_steps, adaptation.rows, adaptation.rows_at_once
    optimizer = torch.optim.AdamW(weights, adaptation.learning_rate, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = adaptation.learning_rate * (1 - step / steps)
        errors = torch.zeros(len(layers), device=teacher.device)
        for low in range(step * rows, (step + 1) * rows, at_once):
            batch = [windows[row % len(windows)].ids for row in range(low, low + at_once)]
            seen = _seen(teacher, tokens_of(batch, teacher))
            for i, (layer, (options, output)) in enumerate(zip(layers, seen)):
                with torch.autocast(output.device.type, dtype=torch.bfloat16):
                    result = layer(**options)[0]
                error = _relative_errors(result, output).sum() / rows
                error.backward()
                errors[i] += error.detach()
        optimizer.step()
        optimizer.zero_grad()
        print(f"layers, step {step}: relative error {float(errors.mean()):.4f}", flush=True)


def _relative_errors(result: Tensor, wanted: Tensor) -> Tensor:
    """Return the squared error of each row over that of zeros [B]; tensors are [B, L, C]."""
    wanted = wanted.float()
    error, size = (x.square().flatten(1).sum(1) for x in (result.float() - wanted, wanted))
    return error / size


def full_layers_of(model: Any) -> list[nn.Module]:
    """Return the modules of a model's full-attention layers."""
    blocks = inner_model(model).get_decoder().layers
    return [blocks[i].self_attn for i in full_layers(model.config)]


@torch.no_grad()
def _seen(teacher: Any, ids: Tensor) -> list[tuple[dict[str, Any], Tensor]]:
    """Return the arguments and the output of each attention layer in one pass."""
    seen: list[tuple[dict[str, Any], Tensor]] = []

    def keep(module: nn.Module, args: Any, options: dict[str, Any], output: Any) -> None:
        names = ("hidden_states", "position_embeddings")
        kept = {name: options[name] for name in names}
        seen.append(({**kept, "attention_mask": None}, output[0]))

    hooks = [
        layer.register_forward_hook(keep, with_kwargs=True) for layer in full_layers_of(teacher)
    ]
    try:
        teacher.get_decoder()(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
