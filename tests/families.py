"""Tiny random models of every tested architecture, and a dense CCA attention to hold them against.

docs/models.py draws the table of supported models from FAMILIES and MORE_FAMILIES; every test of a
model runs with some of FAMILIES, tests/test_architectures.py with all.
"""

import sys

import torch
from transformers import (
    ArceeConfig,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GraniteConfig,
    GraniteMoeConfig,
    HeliumConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from corecontext.integrations.hf.attention_interface import full_attention

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "head_dim": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
HYBRID = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES = {
    "llama": (LlamaConfig, {}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama-linear": (LlamaConfig, {"rope_parameters": LINEAR}),
    "llama-llama3": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-hybrid": (
        Qwen2Config,
        {"layer_types": HYBRID[::-1], "use_sliding_window": True, "sliding_window": 8},
    ),
    "qwen3": (Qwen3Config, {}),
    "qwen3-yarn": (Qwen3Config, {"rope_parameters": YARN}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "phi3": (Phi3Config, {"sliding_window": None}),
    "gemma": (GemmaConfig, {}),
    "gemma2": (
        Gemma2Config,
        {"layer_types": HYBRID, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        Gemma3TextConfig,
        {"layer_types": HYBRID, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "olmo2": (Olmo2Config, {}),
    "glm4": (Glm4Config, {"partial_rotary_factor": 0.5}),
}
MORE_FAMILIES = {
    "arcee": (ArceeConfig, {}),
    "ernie4_5": (Ernie4_5Config, {}),
    "glm": (GlmConfig, {"partial_rotary_factor": 0.5}),
    "glm4_moe": (
        Glm4MoeConfig,
        {
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "granite": (GraniteConfig, {"attention_multiplier": 0.2, "residual_multiplier": 0.7}),
    "granitemoe": (GraniteMoeConfig, {"attention_multiplier": 0.2, **EXPERTS}),
    "helium": (HeliumConfig, {"head_dim": 12}),
    "mixtral": (MixtralConfig, {"sliding_window": None, **EXPERTS}),
    "nemotron": (NemotronConfig, {"partial_rotary_factor": 0.5}),
    "olmo": (OlmoConfig, {"clip_qkv": 2.0}),
    "phimoe": (PhimoeConfig, {"sliding_window": None, **EXPERTS}),
    "seed_oss": (SeedOssConfig, {}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "starcoder2": (Starcoder2Config, {"sliding_window": None}),
}


def tiny_model(family: str = "llama", **changes) -> PreTrainedModel:
    """A random float32 model in evaluation mode; weights large enough that attention matters."""
    kind, own = {**FAMILIES, **MORE_FAMILIES}[family]
    config = kind(**{**SMALL, **own, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        # SDPA ignores a softcap in the oldest releases of transformers.
        attention = full_attention(config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.15)
                elif "norm" not in name:
                    parameter.normal_(0, 0.3)  # biases
    model.generation_config.pad_token_id = 0
    return model


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids."""
    ids = torch.randint(
        2, 96, (rows, length), generator=torch.Generator("cpu").manual_seed(seed), device="cpu"
    )
    return ids.to(torch.get_default_device())


def oracle_logits(
    model: PreTrainedModel, input_ids: torch.Tensor, group_size: int, window_size: int
) -> torch.Tensor:
    """Logits under CCA written out in loops over positions, from keys BEFORE rotary and absolute
    middle positions."""
    full = {
        module: None
        for name, module in model.named_modules()
        if name.endswith("self_attn")
        and (getattr(model.config, "layer_types", None) or ["full_attention"] * 99)[
            module.layer_idx
        ]
        == "full_attention"
    }
    previous = model.config._attn_implementation

    def attention(module, q, k, v, mask, scaling=None, softcap=None, **kwargs):
        if module not in full:
            function = AttentionInterface().get_interface(
                previous, getattr(sys.modules[type(module).__module__], "eager_attention_forward")
            )
            return function(module, q, k, v, mask, scaling=scaling, softcap=softcap, **kwargs)
        return _oracle(model, module, q, k, v, scaling, softcap, group_size, window_size).transpose(
            1, 2
        ), None

    AttentionInterface.register("cca_oracle", attention)
    AttentionMaskInterface.register("cca_oracle", AttentionMaskInterface()[previous])
    model.config._attn_implementation = "cca_oracle"
    try:
        with torch.no_grad():
            return model(input_ids, use_cache=False).logits
    finally:
        model.config._attn_implementation = previous


def _oracle(model, module, q, k, v, scale, softcap, g, s):
    """One attention call in float64, position by position."""
    apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
    types = getattr(model.config, "layer_types", None)
    extra = (
        {"layer_type": types[module.layer_idx]} if model.config.model_type == "gemma3_text" else {}
    )
    length = q.shape[2]
    positions = torch.arange(length)[None]
    cos, sin = (x.double() for x in model.base_model.rotary_emb(q.float(), positions, **extra))
    if not getattr(module, "use_rope", True):  # SmolLM3's layers without rotation
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    size2 = (cos**2 + sin**2)[..., :1]  # the square of the rotary's own scaling
    q, k, v = q.double(), k.double(), v.double()
    unscaled = apply(k, k, cos / size2, -sin / size2)[1]  # keys before rotary
    repeat = q.shape[1] // k.shape[1]
    cap = (lambda x: x) if softcap is None else (lambda x: softcap * torch.tanh(x / softcap))
    core_k, core_v = [], []
    for c in range(length // g):
        span = slice(c * g, c * g + g)
        grouped = k[:, :, span].repeat_interleave(repeat, 1)
        scores = cap(torch.einsum("bhd,bhgd->bhg", q[:, :, c * g + g - 1], grouped) * scale)
        weights = scores.softmax(-1).unflatten(1, (-1, repeat)).mean(2)  # [B, Hkv, g]
        pooled = torch.einsum("bhg,bhgd->bhd", weights, unscaled[:, :, span])[:, :, None]
        middle = slice(c * g + g // 2, c * g + g // 2 + 1)
        core_k.append(apply(pooled, pooled, cos[:, middle], sin[:, middle])[1][:, :, 0])
        core_v.append(torch.einsum("bhg,bhgd->bhd", weights, v[:, :, span]))
    out = torch.empty_like(q)
    for t in range(length):
        j = max(0, (t + 1 - s) // g)
        keys = torch.cat(
            (*(x[:, :, None] for x in core_k[:j]), k[:, :, j * g : t + 1]), 2
        ).repeat_interleave(repeat, 1)
        values = torch.cat(
            (*(x[:, :, None] for x in core_v[:j]), v[:, :, j * g : t + 1]), 2
        ).repeat_interleave(repeat, 1)
        weights = cap(torch.einsum("bhd,bhsd->bhs", q[:, :, t], keys) * scale).softmax(-1)
        out[:, :, t] = torch.einsum("bhs,bhsd->bhd", weights, values)
    return out.float()


def stateless(model, ids):
    """Logits without any cache: the truth for every way of generating."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def recompute(model, ids, count):
    """Greedy tokens, each from one full forward without cache."""
    for _ in range(count):
        ids = torch.cat((ids, stateless(model, ids)[:, -1].argmax(-1, keepdim=True)), 1)
    return ids
