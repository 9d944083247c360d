"""CCA attention inside a Hugging Face model, through transformers' own attention interface: no
class is patched.

`enable` registers nothing on classes and writes no global: it sets this model's attention
implementation to "cca" and adds forward pre-hooks to this model's attention modules, which hand the
layer's compact cache and rotation to the attention function. `disable` takes both away again
(docs/design.md says why each piece is needed).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from corecontext.cache import UNDO_LIMIT
from corecontext.config import CCAConfig, check_int
from corecontext.integrations.hf_cache import CCALayer, compact_layer
from corecontext.integrations.hf_learned import add_learned, remove_learned
from corecontext.integrations.hf_rotary import find_rotary
from corecontext.model_sizes import ModelSizes
from corecontext.ops.api import cca_attention
from corecontext.ops.batch import has_restarts
from corecontext.ops.rotary import Rotary
from corecontext.ops.rules import Learned

if TYPE_CHECKING:
    from corecontext.distributed.context_parallel import Shard

NAME = "cca"
DRAFT = "cca_draft"  # among a call's keyword arguments: how many of its tokens may be taken back
TESTED = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
NO_FULL_ATTENTION = (
    "model must have full-attention layers, got {} attention layers, all with a sliding window. Set "
    "config.sliding_window = None if the model was meant for full attention."
)


class Handle:
    """What `enable` did to one model, and the way to change or undo it."""

    def __init__(self, model: PreTrainedModel, config: CCAConfig, rollback: int) -> None:
        self.model, self.rollback = model, rollback
        self.previous = model.config._attn_implementation
        if self.previous is None or self.previous.startswith(
            NAME
        ):  # loaded with attn_implementation="cca"
            self.previous = full_attention(model.config)
        self._had_setting = getattr(model.config, NAME, None)
        full, other = _attention_modules(model)
        rotary = (
            find_rotary(model, full[0], full[0].layer_idx)
            if config.core_position == "middle"
            else None
        )
        self.full = full
        """The attention modules that have core tokens, in order."""
        self.layers = _by_layer(config, full)
        """The settings of each of them."""
        self.observer: Callable[..., Any] | None = None
        """Called with the index among `full`, q, k, v, scale, softcap, rotary and learned of each
        uncached call."""
        self.hybrid = bool(other)
        """True where some layers (sliding window) keep their own attention and their own cache."""
        saved = CCAConfig.from_dict(self._had_setting).learned if self._had_setting else ()
        add_learned(
            model,
            full,
            config.learned,
            bool(config.learned) and saved == config.learned,
            *_split_of(model),
        )
        self._hooks = [_LayerHook(self, rotary, i) for i in range(len(full))]
        self._hooks += [_LayerHook(self, None, keep=True) for _ in other]
        self._removable = [
            module.register_forward_pre_hook(hook, with_kwargs=True)
            for module, hook in zip(full + other, self._hooks)
        ]
        self._removable.append(
            model.base_model.register_forward_pre_hook(self._refuse_unsupported, with_kwargs=True)
        )
        self._removable.append(model.register_forward_pre_hook(_note_draft, with_kwargs=True))
        self._needs_rotary = rotary is not None
        self._shard: Shard | None = None
        self._set(config)
        self.name = _registered(self.previous)
        model.config._attn_implementation = self.name
        model.__dict__["_corecontext"] = self

    def _set(self, config: CCAConfig) -> None:
        self.layers, self.config = _by_layer(config, self.full, *_split_of(self.model)), config
        self.model.config.cca = config.to_dict()

    @property
    def shard(self) -> Shard | None:
        """Where set, each process of its group runs the model on its part of one sequence (context
        parallelism): pass `shard.layout.take` of the whole's input_ids and position_ids. It holds
        until it is set again, as a backward with checkpointing runs the layers once more."""
        return self._shard

    @shard.setter
    def shard(self, shard: Shard | None) -> None:
        if shard is not None and self.hybrid:
            raise NotImplementedError(
                "a model with sliding-window layers cannot run on parts of a sequence: these "
                "layers see the part only. Use handle.shard = None."
            )
        if shard is not None and self.config.sink_size:
            raise NotImplementedError(
                "the first tokens cannot be kept raw on parts of a sequence, got sink_size "
                f"{self.config.sink_size}. Use handle.shard = None, or sink_size=0."
            )
        self._shard = shard

    def configure(self, **changes: Any) -> None:
        """Change settings, such as group_size and window_size, for caches that start from now on
        (paper 4.3)."""
        config = self.config.replace(**changes)
        if config.core_position == "middle" and not self._needs_rotary:
            raise ValueError(
                "core_position must stay 'token' on a model enabled with it, got 'middle'. "
                "Disable and enable again."
            )
        if config.learned != self.config.learned:
            raise ValueError(
                f"learned must stay {self.config.learned} on an enabled model, got {config.learned}. "
                "Disable and enable again."
            )
        self._set(config)

    def learned(self, index: int) -> Learned:
        """The learned parameters of one of the modules in `full`, by name."""
        return dict(getattr(self.full[index], NAME, {}))

    def _refuse_unsupported(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Runs before the model's forward and says what cannot be had, where transformers would
        return nothing."""
        if kwargs.get("output_attentions") or module.config.output_attentions:
            raise NotImplementedError(
                "output_attentions cannot be returned: CCA attention never forms the weights. "
                "Call handle.disable() to look at full attention."
            )
        if self.shard is not None and kwargs.get("position_ids") is None:
            raise ValueError(
                "position_ids must be given for a part of a sequence, got None. Pass "
                "shard.layout.take(positions of the whole)."
            )

    def disable(self) -> None:
        """Give the model its own attention back; it is then what it was before, bit for bit.

        Learned parameters leave the model: save it before, if they are to be kept.
        """
        if self.model.__dict__.get("_corecontext") is not self:
            raise ValueError(
                "disable must be called once on an enabled model, got a handle that is no longer in use."
            )
        for removable in self._removable:
            removable.remove()
        remove_learned(self.full)
        self.model.config._attn_implementation = self.previous
        if self._had_setting is None:
            del self.model.config.cca
        else:
            self.model.config.cca = self._had_setting
        del self.model.__dict__["_corecontext"]


def enable(model: nn.Module, config: CCAConfig | None = None, *, rollback: int = 0) -> Handle:
    """Replace the causal self-attention of one Hugging Face model by CCA attention.

    Sliding-window layers of hybrid models stay as they are. Caches that the model fills from now on
    are compact.

    Args:
        model: A causal language model of a tested architecture, or a wrapper (PEFT) around one.
        config: Settings; None takes those saved in the model's config.json, else the defaults.
        rollback: Tokens that a cache can always take back. Needed only when this model is the
            assistant in assisted decoding; the model that verifies drafts needs none.

    Returns:
        A handle with `disable()` and `configure()`.

    Raises:
        NotImplementedError: the architecture is not tested, or its rotary embedding changes with
            length.
        TypeError: the model is no transformers model, the config no CCAConfig, or rollback no
            integer.
        ValueError: the model is already enabled, or has no full-attention layer.
    """
    inner = _inner_model(model)
    if not isinstance(config, CCAConfig | None):
        raise TypeError(
            f"config must be a CCAConfig, got {type(config).__name__}. Rivals are enabled by "
            "corecontext.baselines.enable."
        )
    check_int("rollback", rollback, 0)
    if "_corecontext" in inner.__dict__:
        raise ValueError(
            "model must not be enabled twice. Use handle.configure(...) or handle.disable() first."
        )
    if inner.config.model_type not in TESTED:
        raise NotImplementedError(
            f"architecture {inner.config.model_type!r} is not tested with CCA attention. "
            f"Tested: {', '.join(TESTED)}."
        )
    if config is None:
        saved = getattr(inner.config, NAME, None)
        config = CCAConfig() if saved is None else CCAConfig.from_dict(saved)
    return Handle(inner, config, rollback)


@contextlib.contextmanager
def enabled(
    model: nn.Module, config: CCAConfig | None = None, *, rollback: int = 0
) -> Iterator[Handle]:
    """`enable` for the length of a with block."""
    handle = enable(model, config, rollback=rollback)
    try:
        yield handle
    finally:
        handle.disable()


def from_pretrained(
    name_or_path: str, config: CCAConfig | None = None, **kwargs: Any
) -> PreTrainedModel:
    """Load a causal language model and enable CCA with `config`, or with the settings saved in its
    config.json.

    Without either the model keeps its own attention. Other arguments go to
    AutoModelForCausalLM.from_pretrained.
    """
    model = AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs)
    if config is not None or getattr(model.config, NAME, None) is not None:
        enable(model, config)
    return model


def handle_of(model: nn.Module) -> Handle | None:
    """The handle of an enabled model, or None."""
    return _inner_model(model).__dict__.get("_corecontext")


def _inner_model(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model itself or inside a wrapper."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}.")


def full_attention(hf_config: Any) -> str:
    """Transformers' attention to load a model with: SDPA, but for architectures that it refuses
    there, and models with a softcap (Gemma 2), which SDPA leaves out without a word in some of its
    releases."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    capped = getattr(hf_config, "attn_logit_softcapping", None) is not None
    return "sdpa" if getattr(kind, "_supports_sdpa", True) and not capped else "eager"


def has_full_attention(config: Any, layer_idx: int) -> bool:
    """Whether a layer of a model of this Hugging Face config sees everything, not a sliding
    window."""
    types = getattr(config, "layer_types", None)
    return (
        types[layer_idx] == "full_attention"
        if types
        else getattr(config, "sliding_window", None) is None
    )


def full_layers(config: Any) -> list[int]:
    """The layers of a model of this Hugging Face config that see everything."""
    return [layer for layer in range(config.num_hidden_layers) if has_full_attention(config, layer)]


def _attention_modules(model: PreTrainedModel) -> tuple[list[nn.Module], list[nn.Module]]:
    """Attention modules with full causal attention, and the others (sliding window)."""
    modules = [
        m
        for name, m in model.named_modules()
        if hasattr(m, "layer_idx") and name.endswith("self_attn")
    ]
    config = model.config
    full = [m for m in modules if has_full_attention(config, m.layer_idx)]
    if not full:
        raise ValueError(NO_FULL_ATTENTION.format(len(modules)))
    if getattr(config, "use_bidirectional_attention", False) or not getattr(
        config, "is_causal", True
    ):
        raise NotImplementedError(
            "bidirectional attention cannot be replaced by CCA, which is causal."
        )
    return full, [m for m in modules if m not in full]


def _split_of(model: PreTrainedModel) -> tuple[int, int]:
    """Which of how many processes this one is that share each layer's heads (tensor
    parallelism)."""
    size = getattr(model, "tp_size", None) or 1
    return (torch.distributed.get_rank() % size, size) if size > 1 else (0, 1)


def _by_layer(
    config: CCAConfig, full: list[nn.Module], rank: int = 0, processes: int = 1
) -> list[CCAConfig]:
    """The settings of each full-attention layer, as one of the processes that share its heads has
    them."""
    sizes = config.layer_group_sizes
    if sizes is not None and len(sizes) != len(full):
        raise ValueError(
            f"layer_group_sizes must have one g for each of the {len(full)} full-attention layers, got "
            f"{len(sizes)}."
        )
    found = [config.of_layer(i) for i in range(len(full))]
    for module, one in zip(full, found):
        heads = ModelSizes.of(module.config).kv_heads
        if one.head_group_sizes is not None and len(one.head_group_sizes) != heads:
            raise ValueError(
                f"group sizes by head must be one for each of the {heads} KV heads, got "
                f"{one.head_group_sizes}."
            )
    return [one.of_process(rank, processes) for one in found]


def _note_draft(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Assisted decoding sends its first draft together with the prompt, and keeps one logit more
    than it drafted."""
    kept = kwargs.get("logits_to_keep", 0)
    return args, {**kwargs, DRAFT: kept - 1} if isinstance(kept, int) and kept > 1 else kwargs


class _LayerHook:
    """Hands to one attention module's attention function what transformers does not: cache,
    rotation, settings."""

    def __init__(
        self, handle: Handle, rotary: Rotary | None, index: int = 0, keep: bool = False
    ) -> None:
        self.handle, self.rotary, self.index, self.keep = handle, rotary, index, keep

    def __call__(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        handle = self.handle
        if module.config._attn_implementation != handle.name:
            raise RuntimeError(
                f"the attention implementation must stay {handle.name!r} while CCA is enabled, got "
                f"{module.config._attn_implementation!r} (continuous batching changes it, for example)."
                " Call handle.disable() first."
            )
        layer, cache = None, kwargs.get("past_key_values")
        rotary = self._rotary_on((args[0] if args else kwargs["hidden_states"]).device)
        config, learned = handle.layers[self.index], dict(getattr(module, NAME, {}))
        if cache is not None and not self.keep and handle.shard is None:
            layer = compact_layer(cache, module.layer_idx, config, rotary, handle.rollback, learned)
        kwargs[NAME] = _Call(handle, self.index, config, rotary, layer, learned, self.keep)
        return args, kwargs

    def _rotary_on(self, device: torch.device) -> Rotary | None:
        """The rotation on this device, moved once: a copy at every call could not be captured."""
        if self.rotary is not None and self.handle.config.core_position == "middle":
            if self.rotary.inv_freq.device != device:
                self.rotary = Rotary(self.rotary.inv_freq.to(device), self.rotary.interleaved)
            return self.rotary
        return None


class _Call:
    """One attention call's share of the handle."""

    def __init__(
        self,
        handle: Handle,
        index: int,
        config: CCAConfig,
        rotary: Rotary | None,
        layer: CCALayer | None,
        learned: Learned,
        keep: bool,
    ) -> None:
        self.handle, self.index, self.config, self.rotary, self.layer = (
            handle,
            index,
            config,
            rotary,
            layer,
        )
        self.learned, self.keep = learned, keep


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
    """The function registered with transformers as "cca": [B, H, n, D] in, [B, n, H, D] out."""
    call: _Call | None = kwargs.pop(NAME, None)
    if call is None:
        raise RuntimeError(
            "attn_implementation='cca' must be completed by corecontext.enable(model), which gives each "
            "layer its cache and settings. Or load with corecontext.from_pretrained(...)."
        )
    if call.keep:
        function = AttentionInterface().get_interface(call.handle.previous, _eager_of(module))
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
            f"attention dropout must be 0 under CCA, got {dropout}. "
            "Set config.attention_dropout = 0.0."
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be [B, L] with 0 for padding, got {list(attention_mask.shape)}. "
            "CCA attention is causal and builds no L x L mask."
        )
    config, compact = call.config, None if call.layer is None else call.layer.compact
    # planted: sinks: lost on their way into a model
    settings = {
        "group_size": config.head_group_sizes or config.group_size,
        "window_size": config.window_size,
        "num_groups": config.num_groups,
        "pooling": config.pooling,
        "core_position": config.core_position,
        "core_heads": config.core_heads,
        "rotary": call.rotary,
        "scale": scaling,
        "softcap": softcap,
        "core_bias": config.core_bias,
        "sink_size": config.sink_size,
        "backend": config.backend,
    }
    if call.handle.shard is not None:
        if attention_mask is not None:
            raise ValueError(
                "attention_mask must be None for a part of a sequence, got one. Pack documents instead of "
                "padding them."
            )
        from corecontext.distributed.context_parallel import (
            context_parallel_attention,
        )  # not every torch has processes

        return context_parallel_attention(
            query, key, value, call.handle.shard, learned=call.learned, **settings
        ).transpose(1, 2), None
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is not None or attention_mask is not None or query.shape[2] == 1:
        position_ids = None
    if compact is not None:
        packed = cu_seqlens is not None or (compact.is_empty and has_restarts(position_ids))
        if not packed:
            # planted: plug-in: softcap lost on its way
            out = _append(
                compact,
                query,
                key,
                value,
                kwargs.get(DRAFT, 0),
                attention_mask,
                scale=scaling,
                softcap=softcap,
            )
            return out.transpose(1, 2), None
        if call.handle.hybrid:
            raise ValueError(
                "use_cache must be False for packed documents in a model with sliding-window layers, got "
                "True: transformers lets these layers see across documents then. Pass use_cache=False."
            )
        compact.close("documents packed in one row")
    elif call.handle.observer is not None:
        call.handle.observer(
            call.index, query, key, value, scaling, softcap, call.rotary, call.learned
        )
    out = cca_attention(
        query,
        key,
        value,
        attention_mask=attention_mask,
        cu_seqlens=cu_seqlens,
        position_ids=position_ids,
        learned=call.learned,
        **settings,
    )
    return out.transpose(1, 2), None


def _append(
    compact: Any, q: Tensor, k: Tensor, v: Tensor, draft: int, mask: Tensor | None, **options: Any
) -> Tensor:
    """Append to a cache and attend; a long beginning before the draft and the token it follows,
    since a filled cache takes back a short append only."""
    count = q.shape[2]
    first = max(count - draft - 1, int(compact.is_empty))
    apart = (
        0 < draft < count
        and first
        and (compact.is_empty or count > UNDO_LIMIT)
        and not torch.is_grad_enabled()
    )
    if not apart or compact.max_length is not None or compact.config.num_groups is not None:
        return compact.attend(q, k, v, attention_mask=mask, **options)
    start = None if mask is None else mask[:, : mask.shape[1] - count + first]
    before = compact.attend(*(x[:, :, :first] for x in (q, k, v)), attention_mask=start, **options)
    return torch.cat(
        (
            before,
            compact.attend(*(x[:, :, first:] for x in (q, k, v)), attention_mask=mask, **options),
        ),
        2,
    )


def _eager_of(module: nn.Module) -> Any:
    """The eager attention of the file that defines this module's class."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward")


def _mask(
    previous: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function registered with transformers: the padding mask as it is, never L x L.

    Masks of sliding layers (they come with `local_size`) are built by the implementation that the
    model had.
    """
    if "local_size" in kwargs:
        return ALL_MASK_ATTENTION_FUNCTIONS[previous](
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            attention_mask=attention_mask,
            **kwargs,
        )
    if kv_length == 0:  # CCALayer.get_mask_sizes
        return None
    if attention_mask is not None and (
        attention_mask.shape[0] != batch_size or attention_mask.shape[-1] < q_length
    ):
        raise ValueError(
            f"attention_mask must be [B, L] with B = {batch_size} and L at least {q_length}, got "
            f"{list(attention_mask.shape)}. Give 1 for tokens and 0 for padding."
        )
    if attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all())):
        return None
    # planted: plug-in: padding lost on its way
    return attention_mask


def _registered(previous: str) -> str:
    """The name under which CCA is registered for models whose sliding layers keep the attention
    `previous`."""
    name = NAME if previous == "sdpa" else f"{NAME}_{previous}"
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, functools.partial(_mask, previous))
    return name


_registered("sdpa")
