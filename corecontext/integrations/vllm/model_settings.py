"""Read the attention of a model from its config, and refuse in one line settings that are not
available in vLLM."""

from __future__ import annotations

from typing import Any

import torch

from corecontext.config import CCAConfig
from corecontext.integrations.hf.attention_interface import layer_configs
from corecontext.integrations.hf.rotation import check_rope_type
from corecontext.integrations.vllm.raw_heads import RawHeads
from corecontext.model_sizes import ModelSizes
from corecontext.ops.fetch.index import index_of
from corecontext.ops.fetch.low_bits import LowBits
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Spec

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models whose layers all have full attention and rotate halves of all columns of their keys."""
WAY_OUT = "Change it by --hf-overrides, or serve the model by `corecontext serve`."
TAKEN = (
    *("group_size", "layer_group_sizes", "head_group_sizes", "window_size", "sink_size"),
    *("core_position", "core_mass"),
    *("fetch_groups", "fetch_index", "fetch_share", "store", "fetch_slots"),
)
"""Settings that the kernels have. Others must have the values of `CCAConfig.pooling()`."""
UNUSED = ("backend",)
"""Settings without an effect here: there is one backend."""
PREFILL = {False: "fetch", True: "full"}
"""By whether there is fetch: the value of `prefill` that does here what "auto" does."""

FETCH_ONLY = {"layer_group_sizes": None, "head_group_sizes": None}
"""Values that these settings must have with fetch."""


def settings_of(hf_config: Any) -> CCAConfig:
    """Return the settings of the KV heads that have core tokens: `cca` in a model's config.json or
    in --hf-overrides, else the preset "device".

    Raises:
        ValueError: the architecture or a setting is not available in vLLM.
    """
    check_architecture(hf_config)
    return pooled_settings(_config_of(hf_config))


def raw_heads_of(hf_config: Any, ranks: int) -> RawHeads:
    """Return the KV heads that keep every token, for so many ranks of tensor parallelism.

    Raises:
        ValueError: the sizes by layer or head do not fit the model.
    """
    sizes = ModelSizes.of(hf_config)
    layers = layer_configs(_config_of(hf_config), hf_config, sizes.layers)
    return RawHeads.of(layers, sizes.kv_heads, ranks)


def check_architecture(hf_config: Any) -> None:
    """Raise ValueError for a model that is not available with core context in vLLM."""
    architectures = list(getattr(hf_config, "architectures", None) or [])
    if not set(architectures) & set(ARCHITECTURES):
        raise ValueError(
            f"architectures must hold one of {', '.join(ARCHITECTURES)} for core context in vLLM, "
            f"got {architectures}. Serve the model by `corecontext serve`."
        )


def _config_of(hf_config: Any) -> CCAConfig:
    """Return a model's settings, or those for a model that has none."""
    if getattr(hf_config, "cca", None):
        return CCAConfig.saved_in(hf_config)
    return CCAConfig.preset("device")


def pooled_settings(config: CCAConfig) -> CCAConfig:
    """Return the settings of the KV heads that have core tokens, as if all heads had these; others,
    of group size 1, keep every token.

    Raises:
        ValueError: a setting is not available in vLLM.
    """
    for name, pooled in CCAConfig.pooling().to_dict().items():
        given = getattr(config, name)
        values = (pooled,)
        if name == "prefill":
            values = (pooled, PREFILL[config.fetch_groups > 0])
        if name not in (*TAKEN, *UNUSED) and given not in values:
            taken = " or ".join(map(repr, values))
            raise ValueError(f"cca.{name} must be {taken} in vLLM, got {given!r}. {WAY_OUT}")
    if config.fetch_groups:
        _check_fetch(config)
    name, given = "group_size", config.group_size
    for varying in ("layer_group_sizes", "head_group_sizes"):
        if getattr(config, varying) is not None:
            name, given = varying, getattr(config, varying)
    sizes = _sizes(given) - {1}
    if not sizes:
        raise ValueError(
            f"cca.{name} must be at least 2 for a KV head in vLLM, got {given}, which is full "
            "attention. Leave out --attention-backend CUSTOM."
        )
    if len(sizes) > 1:
        raise ValueError(
            f"cca.{name} must be 1 for KV heads that keep every token and equal for the others in "
            f"vLLM, got {given}. {WAY_OUT}"
        )
    return config.replace(group_size=sizes.pop(), layer_group_sizes=None, head_group_sizes=None)


def _check_fetch(config: CCAConfig) -> None:
    """Raise ValueError for settings of fetch that are not available in vLLM."""
    for name, only in FETCH_ONLY.items():
        if getattr(config, name) != only:
            raise ValueError(
                f"cca.{name} must be {only!r} with fetch in vLLM, got {getattr(config, name)!r}. "
                f"{WAY_OUT}"
            )
    index = index_of(config.fetch_index)
    g = config.group_size
    if not isinstance(index, LowBits) or g % index.num_keys(g):
        raise ValueError(
            f"cca.fetch_index must have parts of one size in low bits in vLLM, as 'bits:2', got "
            f"{config.fetch_index!r} for groups of {g}. {WAY_OUT}"
        )
    if not config.sink_size:
        raise ValueError(
            f"cca.sink_size must be at least 1 with fetch in vLLM, got 0: the centre of the index "
            f"takes the place of the core token that first tokens do not have. {WAY_OUT}"
        )
    if config.window_size < g:
        raise ValueError(
            f"cca.window_size must be at least group_size {g} with fetch in vLLM, got "
            f"{config.window_size}. {WAY_OUT}"
        )


def _sizes(given: int | tuple) -> set[int]:
    """Return the group sizes in a setting, which may be tuples of tuples."""
    return {given} if isinstance(given, int) else set().union(*map(_sizes, given))


def spec_of(hf_config: Any, scale: float, softcap: float | None) -> Spec:
    """Return the attention of the KV heads that have core tokens.

    Raises:
        NotImplementedError: keys are rotated by frequencies that change with the length.
        ValueError: as of `settings_of`.
    """
    config = settings_of(hf_config)
    rotary = None
    if config.core_position == "middle":
        rotary = rotary_of(hf_config)
    return Spec.of(config, rotary, scale, softcap or None)


def rotary_of(hf_config: Any) -> Rotary:
    """Return the rotation of a model's keys, by its frequencies in transformers."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    check_rope_type(hf_config, None)
    # `Rotary` caches tables of angles by these frequencies, unless they are an inference tensor.
    with torch.inference_mode(False), torch.device("cpu"):
        return Rotary(LlamaRotaryEmbedding(hf_config).inv_freq.float())
