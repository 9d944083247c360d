"""Read the attention of a model from its config, and refuse in one line settings that the kernels
over block tables do not have."""

from __future__ import annotations

from typing import Any

import torch

from corecontext.config import CCAConfig
from corecontext.integrations.hf_rotary import check_rope_type
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Spec

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""Models whose layers all have full attention and rotate halves of all columns of their keys."""
WAY_OUT = "Change it by --hf-overrides, or serve the model by `corecontext serve`."
TAKEN = {
    "num_groups": None,
    "pooling": "cca",
    "core_heads": "kv",
    "learned": (),
    "layer_group_sizes": None,
    "head_group_sizes": None,
    "fetch_groups": 0,
    "cache_dtype": "auto",
    "prefill": "auto",
}
"""Settings that have one value here."""


def settings_of(hf_config: Any) -> CCAConfig:
    """Return the settings of a model: `cca` in its config.json or in --hf-overrides, else the
    defaults.

    Raises:
        ValueError: the architecture or a setting is not available in vLLM.
    """
    check_architecture(hf_config)
    config = CCAConfig.saved_in(hf_config)
    check_settings(config)
    return config


def check_architecture(hf_config: Any) -> None:
    """Raise ValueError for a model that is not available with core context in vLLM."""
    architectures = list(getattr(hf_config, "architectures", None) or [])
    if not set(architectures) & set(ARCHITECTURES):
        raise ValueError(
            f"architectures must hold one of {', '.join(ARCHITECTURES)} for core context in vLLM, "
            f"got {architectures}. Serve the model by `corecontext serve`."
        )


def check_settings(config: CCAConfig) -> None:
    """Raise ValueError for a setting that is not available in vLLM."""
    for name, value in TAKEN.items():
        given = getattr(config, name)
        if given != value:
            raise ValueError(f"cca.{name} must be {value!r} in vLLM, got {given!r}. {WAY_OUT}")
    if config.group_size == 1:
        raise ValueError(
            "cca.group_size must be at least 2 in vLLM, got 1, which is full attention. "
            "Leave out --attention-backend CUSTOM."
        )


def spec_of(hf_config: Any, scale: float, softcap: float | None) -> Spec:
    """Return the attention of a layer.

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
    # Tables of the rotation are kept with the frequencies, if these are no inference tensor.
    with torch.inference_mode(False), torch.device("cpu"):
        return Rotary(LlamaRotaryEmbedding(hf_config).inv_freq.float())
