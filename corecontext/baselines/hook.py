"""Attach a rival method to a Hugging Face model, as `corecontext.enable` attaches CCA."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from corecontext.baselines.blocks import Scoring
from corecontext.baselines.method import Call, Layer, Method
from corecontext.config import CCAConfig
from corecontext.integrations.hf import enabling as cca_plugin
from corecontext.integrations.hf.attention_interface import (
    AttentionHandle,
    LayerHook,
    check_dropout,
    inner_model,
)
from corecontext.integrations.hf.rotation import find_rotary, rotates
from corecontext.model_sizes import ModelSizes
from corecontext.ops.api import outside_autocast
from corecontext.ops.batch import find_segments, has_restarts
from corecontext.ops.rotary import Rotary


class Handle(AttentionHandle):
    """A rival on one model, and the way to undo it."""

    KIND = "rival"
    ATTRIBUTE = "_corecontext_rival"
    INCOMPLETE = (
        "attn_implementation='rival' must be completed by corecontext.baselines.enable(model, ...)."
    )

    def __init__(self, model: PreTrainedModel, method: Method) -> None:
        super().__init__(model)
        self.method = method
        self.title = method.name
        sizes = ModelSizes.of(model.config)
        # `self.full` are the attention modules of the full-attention layers.
        layers = [
            Layer(module.layer_idx, index, sizes.query_heads, sizes.kv_heads)
            for index, module in enumerate(self.full)
        ]
        rotary = None
        if method.needs_rotary:
            if not all(map(rotates, self.full)):
                raise NotImplementedError(
                    f"{method.name} needs the rotation of every layer, got a model with layers "
                    "that rotate no keys."
                )
            rotary = find_rotary(model, self.full[0], layers[0].index)
        self.replace_attention([RivalHook(self, rotary, layer) for layer in layers])


def enable(
    model: nn.Module, config: Method | CCAConfig, *, untested: bool = False, warn: bool = False
) -> Any:
    """Replace the causal self-attention of one Hugging Face model by a rival's.

    Sliding-window layers stay as they are.

    Args:
        model: A causal language model of an architecture tested with CCA, or a wrapper around one.
        config: The settings of a rival; or a CCAConfig, for which this is `corecontext.enable`.
        untested: Accept other architectures after a self-check on the model itself.
        warn: Of a CCAConfig: warn if the model was not trained with core tokens.

    Returns:
        A handle with `disable()`.

    Raises:
        NotImplementedError: the architecture is not tested, or its rotary embedding changes with
            length.
        ValueError: the model's attention is already replaced, or the rival's settings do not fit
            its layers and heads.
    """
    inner = inner_model(model)
    if rival_of(inner) is not None or cca_plugin.handle_of(inner) is not None:
        raise ValueError(
            "model must not be enabled twice, got one whose attention is replaced. "
            "Disable it first."
        )
    if isinstance(config, CCAConfig):
        return cca_plugin.enable(model, config, untested=untested, warn=warn)
    cca_plugin.admit(inner, untested, needs_rotary=config.needs_rotary)
    return Handle(inner, config)


@contextlib.contextmanager
def enabled(model: nn.Module, config: Method | CCAConfig) -> Iterator[Any]:
    """Enable a rival for the length of a with block."""
    handle = enable(model, config)
    try:
        yield handle
    finally:
        handle.disable()


def rival_of(model: nn.Module) -> Handle | None:
    """Return the handle of a model under a rival, or None."""
    return inner_model(model).__dict__.get(Handle.ATTRIBUTE)


class RivalHook(LayerHook):
    """Forward pre-hook of one full-attention layer: gives it the rival's attention."""

    handle: Handle

    def __init__(self, handle: Handle, rotary: Rotary | None, layer: Layer) -> None:
        super().__init__(handle, rotary)
        self.method = handle.method
        self.method.check(layer)
        self.layer = layer
        self.empty_cache = self.method.make_cache(layer)
        """A cache as the method makes it, None for transformers' growing one."""

    def call(
        self, module: nn.Module, device: torch.device, cache: Cache | None
    ) -> Callable[..., tuple[Tensor, None]]:
        """Return the attention function of this call, with the layer's cache in it."""
        layer_cache = None if cache is None else self.cache_of(cache)
        return functools.partial(self.attention, layer_cache)

    def cache_of(self, cache: Cache) -> Any:
        """Return this layer's cache; an empty growing layer is replaced by the method's own."""
        index = self.layer.index
        while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
            cache.layers.append(cache.layer_class_to_replicate())
        layer = cache.layers[index]
        if self.empty_cache is not None and isinstance(layer, type(self.empty_cache)):
            if layer.settings == self.empty_cache.settings:
                return layer
            raise ValueError(
                f"a cache must keep its sizes {layer.settings}, got {self.empty_cache.settings}. "
                "Start a new cache."
            )
        if type(layer) is not DynamicLayer or getattr(cache, "offloading", False):
            raise NotImplementedError(
                f"a cache of layer type {type(layer).__name__} cannot be used here. "
                "Use DynamicCache."
            )
        if self.empty_cache is None:
            return layer
        if layer.get_seq_length():
            raise ValueError(
                f"the cache must be empty, got {layer.get_seq_length()} tokens cached by "
                "another attention. Start a new cache."
            )
        cache.layers[index] = self.method.make_cache(self.layer)
        return cache.layers[index]

    def attention(
        self,
        cache: Any,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Compute the attention that transformers asks for: [B, H, T, D] in, [B, T, H, D] out."""
        check_dropout(self.method.name, options.get("dropout", 0.0))
        scale = options.get("scaling")
        if scale is None:
            scale = query.shape[3] ** -0.5
        scoring = Scoring(scale, options.get("softcap"))
        tensors, context = outside_autocast(query, key, value)
        with context:
            rotary = self.rotary_on(query.device)
            call = Call(
                *tensors, scoring, self.layer, attention_mask, rotary, cache, module.training
            )
            # Documents packed in a row are told by their bounds, or by positions that restart.
            cu_seqlens = options.get("cu_seq_lens_q")
            position_ids = None
            if cu_seqlens is None and attention_mask is None and query.shape[2] == key.shape[2] > 1:
                position_ids = options.get("position_ids")
            if cu_seqlens is not None or has_restarts(position_ids):
                out = self.attend_documents(call, cu_seqlens, position_ids)
            else:
                out = self.method.attend(call)
            return out.transpose(1, 2), None

    def attend_documents(
        self, call: Call, cu_seqlens: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        """Attend inside each of the documents that are packed in a row."""
        if self.empty_cache is not None and call.cache is not None:
            call.cache.close()
        q, k, v = call[:3]
        out = torch.empty_like(q)
        batch_size, _, length, _ = q.shape
        for row, end_row, start, end in find_segments(
            batch_size, length, None, cu_seqlens, position_ids
        ):
            at = (slice(row, end_row), slice(None), slice(start, end))
            document = call._replace(q=q[at], k=k[at], v=v[at], attention_mask=None, cache=None)
            out[at] = self.method.attend(document)
        return out
