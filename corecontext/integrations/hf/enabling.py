"""CCA attention inside a Hugging Face model: `enable` and its handle.

`enable` changes one model only (attention_interface.py): its layers call CCA attention, and the
caches that it fills are compact. `Handle.disable` undoes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache

from corecontext.config import CCAConfig, check_int
from corecontext.files import UserError
from corecontext.integrations.hf.attention_interface import (
    TESTED,
    AttentionHandle,
    LayerHook,
    check_tested,
    full_attention,
    inner_model,
    layer_configs,
    register,
)
from corecontext.integrations.hf.cache_layers import compact_layer
from corecontext.integrations.hf.layer_call import ALL, DRAFT, CCACall, note_draft
from corecontext.integrations.hf.rotation import (
    check_rope_type,
    find_rotary,
    layer_type_of,
    rotates,
)
from corecontext.integrations.hf.self_check import self_check
from corecontext.integrations.hf.weights import check_keys
from corecontext.ops.rotary import Rotary

if TYPE_CHECKING:
    from corecontext.distributed.context_parallel import Shard

NAME = "cca"
"""Name of the attention in transformers, and of the settings in a model's config."""
NOT_ADAPTED = (
    "this model was not trained with CCA: it understands far text worse until it is adapted by "
    "`corecontext train`.{} In Python warn=False silences this."
)
"""Perplexity of far text, SmolLM2-135M, g = 16, s = 512: 7.2 under full attention, 18.0 without
sinks, 10.1 with 16 (docs/real-model.md)."""
NO_SINKS = " Keep its first tokens, sink_size=16 (--sinks 16): without them it loses most."


class Handle(AttentionHandle):
    """A model under CCA: change its settings, or undo `enable`."""

    KIND = NAME
    ATTRIBUTE = "_corecontext"
    INCOMPLETE = (
        "attn_implementation='cca' must be completed by corecontext.enable(model), which gives "
        "each layer its cache and settings. Or load with corecontext.from_pretrained(...). A model "
        "made from the config of an enabled one needs model.set_attn_implementation('sdpa') first."
    )
    title = "CCA"

    def __init__(self, model: PreTrainedModel, config: CCAConfig, rollback: int) -> None:
        super().__init__(model)
        if self.previous is None or self.previous.startswith(NAME):
            # Loaded with attn_implementation="cca".
            self.previous = full_attention(model.config)
        self.rollback = rollback
        self.hybrid = bool(self.sliding)
        """Whether some layers (sliding window) keep their own attention and cache."""
        self.observer: Callable[..., Any] | None = None
        """Called at each uncached call with the layer's index in `full`, q, k, v, scale, softcap
        and rotary."""
        self._shard: Shard | None = None
        self._saved_settings = getattr(model.config, NAME, None)

        # All that may raise comes before the model changes.
        self._rotary = None
        if config.core_position == "middle":
            self._rotary = find_rotary(model, self.full[0], self.full[0].layer_idx)
        self._set(config)
        hooks = [CCAHook(self, self._rotary, index) for index in range(len(self.full))]
        self.replace_attention(hooks)
        self.add_hook(model, note_draft)  # tells layers which tokens are not a prompt's

    def _set(self, config: CCAConfig) -> None:
        """Use these settings from now on."""
        layers = layer_configs(config, self.model.config, len(self.full))
        for index, module in enumerate(self.full):
            # mutant plug-in: a layer that rotates no keys has its core keys rotated
            if not rotates(module):
                layers[index] = dataclasses.replace(layers[index], core_position="token")
        self.layers = [layer.of_process(*_tensor_parallel(self.model)) for layer in layers]
        """The settings of each module in `full`, for this process's heads (tensor parallelism)."""
        self.config = config
        self.model.config.cca = config.to_dict()

    @property
    def shard(self) -> Shard | None:
        """This process's tokens of a sequence in context parallelism; None runs whole sequences.

        While it is set, pass the model `shard.layout.take(x)` of the whole sequence's input_ids and
        position_ids. Keep it set through the backward pass: checkpointing runs the layers again.
        """
        return self._shard

    @shard.setter
    def shard(self, shard: Shard | None) -> None:
        if shard is not None and self.hybrid:
            raise NotImplementedError(
                "a model with sliding-window layers cannot run on parts of a sequence: these "
                "layers see the part only. Use handle.shard = None."
            )
        if shard is not None:
            for module in self.full:
                check_rope_type(
                    self.model.config, layer_type_of(self.model.config, module.layer_idx)
                )
        self._shard = shard

    def configure(self, **changes: Any) -> None:
        """Change settings, such as group_size and window_size, for caches that start from now on
        (section 4.3 of the paper)."""
        config = self.config.replace(**changes)
        if config.core_position == "middle" and self._rotary is None:
            raise ValueError(
                "core_position must stay 'token' on a model enabled with it, got 'middle'. "
                "Disable and enable again."
            )
        self._set(config)

    def check_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Refuse what CCA cannot return, and a shard's tokens without their positions."""
        super().check_forward(module, args, kwargs)
        if self.shard is not None and kwargs.get("position_ids") is None:
            raise ValueError(
                "position_ids must be given for a part of a sequence, got None. Pass "
                "shard.layout.take(positions of the whole)."
            )

    def disable(self) -> None:
        """Restore the model's own attention, bit for bit."""
        super().disable()
        if self._saved_settings is None:
            del self.model.config.cca
        else:
            self.model.config.cca = self._saved_settings


class CCAHook(LayerHook):
    """Forward pre-hook of one full-attention layer: adds its `CCACall`."""

    handle: Handle

    def __init__(self, handle: Handle, rotary: Rotary | None, index: int) -> None:
        super().__init__(handle, rotary)
        self.index = index
        """Of the layer in `handle.full`."""

    def call(self, module: nn.Module, device: torch.device, cache: Cache | None) -> CCACall:
        """Collect the layer's settings, rotation and cache."""
        handle = self.handle
        config = handle.layers[self.index]
        rotary = None
        if config.core_position == "middle":
            rotary = self.rotary_on(device)
        compact = None
        if cache is not None and handle.shard is None:
            options = {"rollback": handle.rollback}
            layer = compact_layer(cache, module.layer_idx, config, rotary, **options)
            layer.is_attended = True
            layer.is_alone = not handle.hybrid
            compact = layer.compact
        observer = None
        if handle.observer is not None:
            observer = functools.partial(handle.observer, self.index)
        return CCACall(config, rotary, compact, handle.shard, observer, handle.hybrid)


def enable(
    model: nn.Module,
    config: CCAConfig | None = None,
    *,
    rollback: int = 0,
    untested: bool = False,
    warn: bool = True,
) -> Handle:
    """Replace the causal self-attention of one Hugging Face model by CCA attention.

    Sliding-window layers of hybrid models stay as they are. Caches that the model fills from now on
    are compact.

    Args:
        model: A causal language model of a tested architecture, or a wrapper (PEFT) around one.
        config: Settings; None takes those saved in the model's config.json, else the defaults.
        rollback: Tokens that a cache can always take back. Needed only when this model is the
            assistant in assisted decoding; the model that verifies drafts needs none.
        untested: Accept other architectures after a self-check on the model itself: groups of one
            token must equal full attention, a cache must equal one pass without it, and keys must
            rotate as expected.
        warn: Warn if core tokens are used without fetch and the model's config has no CCA settings,
            so that it was not trained with them.

    Returns:
        A handle with `disable()` and `configure()`.

    Raises:
        NotImplementedError: the architecture is not tested or fails the self-check, or its rotary
            embedding changes with length.
        TypeError: the model is no transformers model, the config no CCAConfig, or rollback no
            integer.
        ValueError: the model is already enabled, or has no full-attention layer.
    """
    inner = inner_model(model)
    if not isinstance(config, CCAConfig | None):
        raise TypeError(
            f"config must be a CCAConfig, got {type(config).__name__}. Rivals are enabled by "
            "corecontext.baselines.enable."
        )
    check_int("rollback", rollback, 0)
    if handle_of(inner) is not None:
        raise ValueError(
            "model must not be enabled twice. Use handle.configure(...) or handle.disable() first."
        )
    if config is None:
        config = CCAConfig.saved_in(inner.config)
    admit(inner, untested, needs_rotary=config.core_position == "middle")
    # mutant plug-in: a model that was never adapted is enabled in silence
    if warn and not config.fetch_groups and getattr(inner.config, NAME, None) is None:
        advice = "" if config.sink_size else NO_SINKS
        warnings.warn(NOT_ADAPTED.format(advice), stacklevel=2)
    return Handle(inner, config, rollback)


def admit(model: PreTrainedModel, untested: bool, *, needs_rotary: bool) -> None:
    """Raise unless a model's architecture is tested, or `untested` is true and the model passes the
    self-check; with `needs_rotary` its rotation is checked, too."""
    check_tested(model.config, untested)
    if model.config.model_type not in TESTED:
        config = CCAConfig.paper(core_position="middle" if needs_rotary else "token")
        self_check(model, lambda **sizes: Handle(model, config.replace(**sizes), 0))


@contextlib.contextmanager
def enabled(model: nn.Module, config: CCAConfig | None = None, **options: Any) -> Iterator[Handle]:
    """Enable CCA for the length of a with block; arguments as for `enable`."""
    handle = enable(model, config, **options)
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

    Raises:
        ValueError: the checkpoint lacks weights or has too many.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        name_or_path, output_loading_info=True, **kwargs
    )
    model, info = loaded
    try:
        check_keys(name_or_path, info)
    except UserError as error:
        raise ValueError(str(error)) from None
    if config is not None or getattr(model.config, NAME, None) is not None:
        enable(model, config)
    return model


def handle_of(model: nn.Module) -> Handle | None:
    """Return the handle of an enabled model, or None."""
    return inner_model(model).__dict__.get(Handle.ATTRIBUTE)


def scored(model: Any) -> dict[str, Any]:
    """Return keyword arguments of a call whose tokens are scored. All of them count as a draft:
    each sees the past by its own choice, not as `CCAConfig.prefill` reads prompts."""
    is_enabled = isinstance(model, nn.Module) and handle_of(model) is not None
    # mutant prefill: the perplexity of full attention
    return {DRAFT: ALL} if is_enabled else {}


def _tensor_parallel(model: PreTrainedModel) -> tuple[int, int]:
    """Return this process's rank and the number of processes that share each layer's heads."""
    size = getattr(model, "tp_size", None) or 1
    if size == 1:
        return 0, 1
    return torch.distributed.get_rank() % size, size


# So that from_pretrained(attn_implementation="cca") finds the name before `enable` completes it.
register(NAME, Handle.INCOMPLETE, "sdpa")
