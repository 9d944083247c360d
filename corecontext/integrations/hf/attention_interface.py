"""Replace the attention of a Hugging Face model through transformers' own interface, and undo it.

transformers calls the function that is registered under the name `config._attn_implementation`, but
passes it neither the cache nor the layer's settings. So a forward pre-hook on each attention module
adds a keyword argument CALL, a callable that has both and computes the attention; the registered
function only calls it. No class is patched (docs/design.md has the reasons).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from corecontext.config import CCAConfig
from corecontext.integrations.hf.cache_name import given_cache
from corecontext.model_sizes import ModelSizes
from corecontext.ops.rotary import Rotary

CALL = "corecontext_call"
"""Name of that keyword argument."""
TESTED = (
    *("arcee", "ernie4_5", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe"),
    *("granite", "granitemoe", "helium", "llama", "mistral", "mixtral", "nemotron", "olmo"),
    *("olmo2", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
    "starcoder2",
)
"""Architectures by `model_type`; tests/families.py has a small model of each."""
NO_FULL_ATTENTION = (
    "model must have full-attention layers, got {} attention layers, all with a sliding window. "
    "Set config.sliding_window = None if the model was meant for full attention."
)

# The layers of a model


def inner_model(model: nn.Module) -> PreTrainedModel:
    """Return the Hugging Face model itself, also from inside a wrapper such as PEFT's."""
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                return module
    raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}.")


def has_full_attention(config: Any, layer_idx: int) -> bool:
    """Whether a layer of a model of this Hugging Face config sees the whole past, instead of a
    sliding window."""
    types = getattr(config, "layer_types", None)
    if types:
        return types[layer_idx] == "full_attention"
    return getattr(config, "sliding_window", None) is None


def full_layers(config: Any) -> list[int]:
    """Return the indices of a model's full-attention layers."""
    return [layer for layer in range(config.num_hidden_layers) if has_full_attention(config, layer)]


def check_tested(hf_config: Any, untested: bool = False) -> None:
    """Raise for an architecture that no test has, unless that is accepted."""
    if hf_config.model_type not in TESTED and not untested:
        raise NotImplementedError(
            f"architecture {hf_config.model_type!r} is not tested with CCA attention. Tested: "
            f"{', '.join(TESTED)}. To use it after a self-check on the model itself: "
            "enable(..., untested=True), or --untested."
        )


def full_attention(hf_config: Any) -> str:
    """Return the attention implementation to load a model with: "sdpa", or "eager" for
    architectures without SDPA and models with a softcap (Gemma 2), which SDPA silently ignores in
    some releases of transformers."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    has_softcap = getattr(hf_config, "attn_logit_softcapping", None) is not None
    if has_softcap or not getattr(model_class, "_supports_sdpa", True):
        return "eager"
    return "sdpa"


def layer_configs(config: CCAConfig, hf_config: Any, count: int) -> list[CCAConfig]:
    """Return the settings of each of the `count` full-attention layers of a model.

    Raises:
        ValueError: the sizes by layer or head do not fit the model.
    """
    sizes = config.layer_group_sizes
    if sizes is not None and len(sizes) != count:
        raise ValueError(
            f"layer_group_sizes must have one g for each of the {count} full-attention layers, "
            f"got {len(sizes)}."
        )
    layers = [config.of_layer(index) for index in range(count)]
    heads = ModelSizes.of(hf_config).kv_heads
    for layer in layers:
        if layer.head_group_sizes is not None and len(layer.head_group_sizes) != heads:
            raise ValueError(
                f"group sizes by head must be one for each of the {heads} KV heads, got "
                f"{layer.head_group_sizes}."
            )
    return layers


def attention_modules(model: PreTrainedModel) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the attention modules with full causal attention, and those with a sliding window.

    Raises:
        ValueError: no layer has full attention.
        NotImplementedError: the attention is bidirectional.
    """
    config = model.config
    modules = [
        module
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx") and name.endswith("self_attn")
    ]
    full = [module for module in modules if has_full_attention(config, module.layer_idx)]
    if not full:
        raise ValueError(NO_FULL_ATTENTION.format(len(modules)))
    is_causal = getattr(config, "is_causal", True)
    if not is_causal or getattr(config, "use_bidirectional_attention", False):
        raise NotImplementedError(
            "bidirectional attention cannot be replaced by CCA, which is causal."
        )
    return full, [module for module in modules if module not in full]


# Replacing and undoing


class AttentionHandle:
    """A change of one model's attention, and the way to undo it."""

    KIND: ClassVar[str]
    """Beginning of the names under which the attention is registered, such as "cca"."""
    ATTRIBUTE: ClassVar[str]
    """Attribute of the model that holds the handle."""
    INCOMPLETE: ClassVar[str]
    """Error of a model that has the registered name but no hooks."""
    title: str
    """Name of the attention in errors."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.previous: str = model.config._attn_implementation
        """The model's own attention implementation, which sliding-window layers keep."""
        self.full, self.sliding = attention_modules(model)
        """The attention modules that are replaced, in order, and those that are not."""
        self.name = ""
        """The name under which the attention is registered."""
        self._removable: list[Any] = []
        """Handles of the hooks."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the attention again: a pickled model may be loaded in another process."""
        self.__dict__ = state
        register(self.KIND, self.INCOMPLETE, self.previous)

    def replace_attention(self, hooks: Sequence[LayerHook]) -> None:
        """Route the model's attention calls through these hooks, one for each module in `full`."""
        for module, hook in zip(self.full, hooks, strict=True):
            self.add_hook(module, hook)
        for module in self.sliding:
            self.add_hook(module, LayerHook(self))
        self.add_hook(self.model.base_model, self.check_forward)
        self.name = register(self.KIND, self.INCOMPLETE, self.previous)
        self.model.config._attn_implementation = self.name
        self.model.__dict__[self.ATTRIBUTE] = self

    def add_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register a forward pre-hook that `disable` removes."""
        self._removable.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def check_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Refuse empty inputs, options that transformers would silently ignore, and another
        attention than this one."""
        name = module.config._attn_implementation
        if name != self.name:
            raise RuntimeError(
                f"the attention implementation must stay {self.name!r} while {self.title} is "
                f"enabled, got {name!r} (continuous batching changes it, for example). Call "
                "handle.disable() first."
            )
        names = ("inputs_embeds", "input_ids")
        tokens = next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
        if tokens is not None and not tokens.numel():
            raise ValueError(
                "input_ids must hold at least one row of one token, got shape "
                f"{list(tokens.shape)}."
            )
        if kwargs.get("output_attentions") or module.config.output_attentions:
            raise NotImplementedError(
                f"output_attentions cannot be returned: {self.title} attention never forms the "
                "weights. Set config.output_attentions = False (in config.json: false), or call "
                "handle.disable() to look at full attention."
            )

    def disable(self) -> None:
        """Restore the model's own attention, bit for bit."""
        if self.model.__dict__.get(self.ATTRIBUTE) is not self:
            raise ValueError(
                "disable must be called once on an enabled model, got a handle that is no longer "
                "in use."
            )
        for removable in self._removable:
            removable.remove()
        self.model.config._attn_implementation = self.previous
        del self.model.__dict__[self.ATTRIBUTE]


class LayerHook:
    """Forward pre-hook of one attention module: adds the callable that computes its attention, here
    the attention that the model had; subclasses override `call`."""

    def __init__(self, handle: AttentionHandle, rotary: Rotary | None = None) -> None:
        self.handle = handle
        self.rotary = rotary

    def __call__(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        kwargs[CALL] = self.call(module, hidden_states.device, given_cache(kwargs))
        return args, kwargs

    def call(
        self, module: nn.Module, device: torch.device, cache: Cache | None
    ) -> Callable[..., tuple[Tensor, Any]]:
        """Return the attention function of this call, with transformers' arguments and results."""
        # Each family has an "eager" function of its own.
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward")
        return AttentionInterface().get_interface(self.handle.previous, eager)

    def rotary_on(self, device: torch.device) -> Rotary | None:
        """Return the rotation on this device. It is moved once: a captured step cannot copy it."""
        if self.rotary is not None and self.rotary.inv_freq.device != device:
            self.rotary = Rotary(self.rotary.inv_freq.to(device), self.rotary.interleaved)
        return self.rotary


def check_dropout(title: str, dropout: float) -> None:
    """Raise unless attention dropout is off."""
    if dropout:
        raise NotImplementedError(
            f"attention dropout must be 0 under {title}, got {dropout}. "
            "Set config.attention_dropout = 0.0."
        )


# What transformers calls


def register(kind: str, incomplete: str, previous: str) -> str:
    """Register attention and mask functions with transformers; return their name.

    Args:
        kind, incomplete: KIND and INCOMPLETE of `AttentionHandle`.
        previous: The attention implementation that sliding-window layers keep.
    """
    name = kind if previous == "sdpa" else f"{kind}_{previous}"
    AttentionInterface.register(name, functools.partial(_attention, incomplete))
    AttentionMaskInterface.register(name, functools.partial(padding_mask, previous))
    return name


def _attention(incomplete: str, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Call the function that the layer's hook has added: [B, H, n, D] in, [B, n, H, D] out."""
    call = kwargs.pop(CALL, None)
    if call is None:
        raise RuntimeError(incomplete)
    return call(*args, **kwargs)


def padding_mask(
    previous: str, batch_size: int, q_length: int, kv_length: int, **kwargs: Any
) -> Tensor | None:
    """Return the padding mask [B, L] as it was given, or None where there is no padding; for
    sliding-window layers the L x L mask of the attention that the model had."""
    if "local_size" in kwargs:  # a sliding-window layer
        return ALL_MASK_ATTENTION_FUNCTIONS[previous](
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, **kwargs
        )
    attention_mask = kwargs.get("attention_mask")
    if attention_mask is None or kv_length == 0:  # 0 says none is needed: CCALayer.get_mask_sizes
        return None
    if attention_mask.shape[0] != batch_size or attention_mask.shape[-1] < q_length:
        raise ValueError(
            f"attention_mask must be [B, L] with B = {batch_size} and L at least {q_length}, got "
            f"{list(attention_mask.shape)}. Give 1 for tokens and 0 for padding."
        )
    if not torch.compiler.is_compiling() and bool(attention_mask.all()):
        return None
    # mutant plug-in: padding lost on its way
    return attention_mask
