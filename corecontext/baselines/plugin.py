"""Rivals inside a Hugging Face model, through the same interface of transformers as our own
attention."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from corecontext.baselines.blocks import dense_attention, shifted_attention
from corecontext.baselines.cache import DuoLayer, SinkLayer, left_padding
from corecontext.baselines.configs import DuoAttention, LongLoRA, MInference, Rival
from corecontext.baselines.minference import sparse_attention
from corecontext.config import CCAConfig
from corecontext.integrations import hf_attention
from corecontext.integrations import transformers as ours
from corecontext.integrations.hf_rotary import find_rotary
from corecontext.model_sizes import ModelSizes
from corecontext.ops.api import outside_autocast
from corecontext.ops.batch import find_segments, has_restarts
from corecontext.ops.rotary import Rotary

NAME = "rival"
Observer = Callable[[int, Tensor, Tensor, Tensor, float, "float | None"], Any]


class Handle:
    """What `enable` did to one model, and the way to undo it."""

    def __init__(self, model: PreTrainedModel, config: Any) -> None:
        self.model, self.config = model, config
        self.previous = model.config._attn_implementation
        full, other = hf_attention.attention_modules(model)
        self.has_own_cache = not isinstance(config, (MInference, LongLoRA))
        self.indexes = {module.layer_idx: index for index, module in enumerate(full)}
        self.kv_heads = ModelSizes.of(model.config).kv_heads
        self.observer: Observer | None = None
        """Called with each layer's queries, keys and values; then attention is full (the search for
        patterns)."""
        rotary = None
        if self.has_own_cache and config.far_position != "none":
            rotary = find_rotary(model, full[0], full[0].layer_idx)
        self.name = _registered(self.previous)
        self._removable = [
            module.register_forward_pre_hook(
                _LayerHook(self, rotary, module in other), with_kwargs=True
            )
            for module in full + other
        ]
        self._removable.append(
            model.base_model.register_forward_pre_hook(_refuse_weights, with_kwargs=True)
        )
        model.config._attn_implementation = self.name
        model.__dict__["_corecontext_rival"] = self

    def settings(self, layer_idx: int) -> tuple[Any, ...]:
        """What a cache of one layer is made with."""
        c = self.config
        more = (
            (c.of(self.indexes[layer_idx], self.kv_heads), self.kv_heads)
            if isinstance(c, DuoAttention)
            else ()
        )
        return c.sinks, c.window_size, *more

    def new_layer(self, layer_idx: int) -> SinkLayer:
        """An empty cache of one layer."""
        return (DuoLayer if isinstance(self.config, DuoAttention) else SinkLayer)(
            *self.settings(layer_idx)
        )

    def disable(self) -> None:
        """Give the model its own attention back."""
        if self.model.__dict__.get("_corecontext_rival") is not self:
            raise ValueError(
                "disable must be called once on an enabled model, got a handle that is no longer in use."
            )
        for removable in self._removable:
            removable.remove()
        self.model.config._attn_implementation = self.previous
        del self.model.__dict__["_corecontext_rival"]


def enable(model: nn.Module, config: Rival) -> Any:
    """Replace the causal self-attention of one Hugging Face model by a rival's; sliding-window
    layers stay.

    Args:
        model: A causal language model of an architecture tested with CCA, or a wrapper around one.
        config: StreamingLLM, LMInfinite, WindowOnly, DuoAttention, MInference or LongLoRA; or a
            CCAConfig (other poolings), for which this is `corecontext.enable`.

    Returns:
        A handle with `disable()`.

    Raises:
        NotImplementedError: the architecture is not tested, or its rotary embedding changes with
            length.
        ValueError: the model's attention is already replaced, or patterns do not fit its layers and
            heads.
    """
    inner = hf_attention.inner_model(model)
    if rival_of(inner) is not None or ours.handle_of(inner) is not None:
        raise ValueError(
            "model must not be enabled twice, got one whose attention is replaced. Disable it first."
        )
    if isinstance(config, CCAConfig):
        return ours.enable(model, config)
    if inner.config.model_type not in hf_attention.TESTED:
        raise NotImplementedError(
            f"architecture {inner.config.model_type!r} is not tested. "
            f"Tested: {', '.join(hf_attention.TESTED)}."
        )
    if isinstance(config, MInference):
        for module in hf_attention.attention_modules(inner)[0]:
            config.of(module.layer_idx, inner.config.num_attention_heads)
    if isinstance(config, DuoAttention):
        for index, module in enumerate(hf_attention.attention_modules(inner)[0]):
            config.of(index, module.config.num_key_value_heads)
    return Handle(inner, config)


@contextlib.contextmanager
def enabled(model: nn.Module, config: Rival) -> Iterator[Any]:
    """`enable` for the length of a with block."""
    handle = enable(model, config)
    try:
        yield handle
    finally:
        handle.disable()


def rival_of(model: nn.Module) -> Handle | None:
    """The handle of a model under a rival, or None."""
    return hf_attention.inner_model(model).__dict__.get("_corecontext_rival")


class _LayerHook:
    """Hands to one attention module's attention function its rival, its cache layer and the
    rotation."""

    def __init__(self, handle: Handle, rotary: Rotary | None, keep: bool) -> None:
        self.handle, self.rotary, self.keep, self.layer = handle, rotary, keep, None

    def __call__(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        if module.config._attn_implementation != self.handle.name:
            raise RuntimeError(
                f"the attention implementation must stay {self.handle.name!r} while a rival is enabled, "
                f"got {module.config._attn_implementation!r}. Call handle.disable() first."
            )
        device = (args[0] if args else kwargs["hidden_states"]).device
        if self.rotary is not None and self.rotary.inv_freq.device != device:
            self.rotary = Rotary(self.rotary.inv_freq.to(device), self.rotary.interleaved)
        cache = kwargs.get("past_key_values")
        self.layer = (
            None if cache is None or self.keep else _layer(cache, module.layer_idx, self.handle)
        )
        kwargs[NAME] = self
        return args, kwargs


def _layer(cache: Cache, index: int, handle: Handle) -> Any:
    """This layer's cache; the place of an empty growing layer is taken where the rival has a cache
    of its own."""
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, SinkLayer) and handle.has_own_cache:
        if layer.settings == handle.settings(index):
            return layer
        raise ValueError(
            f"a cache must keep its sizes {layer.settings}, got {handle.settings(index)}. "
            "Start a new cache."
        )
    if type(layer) is not DynamicLayer or getattr(cache, "offloading", False):
        raise NotImplementedError(
            f"past_key_values of layer type {type(layer).__name__} cannot be used here. "
            "Use DynamicCache."
        )
    if not handle.has_own_cache:
        return layer
    if layer.get_seq_length():
        raise ValueError(
            f"past_key_values must be empty, got {layer.get_seq_length()} tokens cached by another "
            "attention. Start a new cache."
        )
    cache.layers[index] = handle.new_layer(index)
    return cache.layers[index]


def _refuse_weights(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions") or module.config.output_attentions:
        raise NotImplementedError(
            "output_attentions cannot be returned: the weights are never formed as a whole. "
            "Call handle.disable() to look at full attention."
        )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers: [B, H, n, D] in, [B, n, H, D] out."""
    call: _LayerHook | None = kwargs.pop(NAME, None)
    if call is None:
        raise RuntimeError(
            "attn_implementation='rival' must be completed by corecontext.baselines.enable(model, ...)."
        )
    handle = call.handle
    if call.keep:
        function = hf_attention.attention_function(module, handle.previous)
        return function(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            dropout=dropout,
            softcap=softcap,
            **kwargs,
        )
    if dropout:
        raise NotImplementedError(
            f"attention dropout must be 0 under {handle.config.name}, got {dropout}. "
            "Set config.attention_dropout = 0.0."
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    (query, key, value), context = outside_autocast(query, key, value)
    with context:
        if handle.observer is not None:
            handle.observer(module.layer_idx, query, key, value, scale, softcap)
            return dense_attention(query, key, value, scale, softcap).transpose(1, 2), None
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        packed = cu_seqlens is not None or (
            attention_mask is None
            and query.shape[2] == key.shape[2] > 1
            and has_restarts(position_ids)
        )
        if packed:
            if isinstance(call.layer, SinkLayer):
                call.layer.close()
            out = torch.empty_like(query)
            position_ids = position_ids if cu_seqlens is None else None
            for row, end_row, start, end in find_segments(
                query.shape[0], query.shape[2], None, cu_seqlens, position_ids
            ):
                part = (slice(row, end_row), slice(None), slice(start, end))
                out[part] = _one(
                    handle,
                    module,
                    None,
                    call.rotary,
                    query[part],
                    key[part],
                    value[part],
                    None,
                    scale,
                    softcap,
                )
            return out.transpose(1, 2), None
        out = _one(
            handle,
            module,
            call.layer,
            call.rotary,
            query,
            key,
            value,
            attention_mask,
            scale,
            softcap,
        )
        return out.transpose(1, 2), None


def _one(
    handle: Handle,
    module: nn.Module,
    layer: Any,
    rotary: Rotary | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """One attention call on unpacked rows."""
    config = handle.config
    if handle.has_own_cache:
        if layer is not None:
            return layer.attend(
                q,
                k,
                v,
                attention_mask,
                far_position=config.far_position,
                rotary=rotary,
                scale=scale,
                softcap=softcap,
            )
        alone = handle.new_layer(
            module.layer_idx
        )  # holds no more than its own sizes when it is dropped
        return alone.attend(
            q,
            k,
            v,
            attention_mask,
            far_position=config.far_position,
            rotary=rotary,
            scale=scale,
            softcap=softcap,
        )
    if attention_mask is not None and bool(left_padding(attention_mask).any()):
        raise NotImplementedError(
            f"rows must not be padded on the left under {config.name}: give them one by one, or "
            "pad on the right."
        )
    if isinstance(config, LongLoRA):
        if not module.training:
            return dense_attention(q, k, v, scale, softcap)
        if k.shape[2] != q.shape[2]:
            raise ValueError(
                "shifted sparse attention trains on whole sequences, got a filled cache. "
                "Call model.eval() to generate."
            )
        size = config.group_size or max(2, -(-q.shape[2] // 4))
        return shifted_attention(q, k, v, size, scale, softcap)
    if q.shape[2] < config.block_size:  # decoding, and prompts too short for a block
        return dense_attention(q, k, v, scale, softcap)
    return sparse_attention(
        q,
        k,
        v,
        config.of(module.layer_idx, q.shape[1]),
        block_size=config.block_size,
        probe=config.probe,
        scale=scale,
        softcap=softcap,
    )


def _registered(previous: str) -> str:
    """The name under which rivals are registered for models whose sliding layers keep the attention
    `previous`."""
    name = f"{NAME}_{previous}"
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, functools.partial(hf_attention.padding_mask, previous))
    return name
