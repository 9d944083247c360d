"""Make the model that a run trains: load it, extend its context, replace its attention, choose the
trained weights; and export it at the end."""

import contextlib
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from corecontext.config import PRESETS, CCAConfig
from corecontext.files import UserError, install_command
from corecontext.integrations.hf.weights import check_finite, load_weights
from corecontext.loading import check_architecture, load_config, one_line
from corecontext.methods import pick_rival
from corecontext.model_sizes import ModelSizes
from corecontext.train.train_config import DEFAULT_RECIPE, RECIPES, SCHEDULE, TrainConfig

PARTIAL_LAYERS = ("q_proj", "k_proj", "v_proj")
"""Layers of W^Q, W^K and W^V; models with one matrix for all three call it qkv_proj."""
_CUTOFFS = ("top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings of sampling, which a greedy GenerationConfig must not have."""


def prepare_config(config: TrainConfig) -> Any:
    """Load the Hugging Face config of the run's model and change it for the run.

    Set its shape, rotary base and length, and attention's dropout to 0. Keep saved settings of CCA
    only where the run trains the checkpoint on with CCA.

    Raises:
        UserError: there is no such model, or it does not support these settings.
    """
    if not config.model:
        raise UserError(
            "model must be given, got none. Use --model FOLDER, or an identifier on the hub."
        )
    hf_config = load_config(config.model)
    check_architecture(hf_config, config.untested)
    limit = _teaching_limit(config, hf_config)
    if config.distil and limit is not None:
        raise UserError(
            f"context_length must be at most the model's {limit} tokens with distil "
            f"{config.distil:g}, got {config.context_length}: it cannot teach beyond them. Extend "
            "it by a run with --method full first, and distil from the result."
        )
    # Shape: a config made anew checks the sizes against each other.
    for name, value in config.shape.items():
        if not hasattr(hf_config, name):
            raise UserError(f"shape must name settings of {hf_config.model_type}, got {name!r}.")
        setattr(hf_config, name, value)
    if config.shape and config.strategy == "scratch":
        settings = hf_config.to_dict()
        settings.pop("model_type", None)
        try:
            hf_config = type(hf_config)(**settings)
        except Exception as error:  # of a check by transformers, with the reason as its cause
            raise UserError(f"shape does not make a model: {error.__cause__ or error}") from None
    sizes = ModelSizes.of(hf_config)
    if sizes.query_heads % sizes.kv_heads:
        raise UserError(
            f"num_attention_heads must be a multiple of num_key_value_heads {sizes.kv_heads}, got "
            f"{sizes.query_heads}. Change --shape."
        )
    # Positions, dropout, and settings of CCA that an earlier run has left.
    extend_context(hf_config, config.rope_theta, config.context_length)
    if getattr(hf_config, "attention_dropout", 0.0):
        hf_config.attention_dropout = 0.0  # no kernel forms the weights that it would drop
    if hasattr(hf_config, "cca") and (config.method != "cca" or config.strategy == "scratch"):
        del hf_config.cca
    return hf_config


def _saved_cca(hf_config: Any) -> dict[str, Any]:
    """Return CCA's settings in a Hugging Face config; {} for none."""
    return getattr(hf_config, "cca", None) or {}


def saved_settings(config: TrainConfig, given: Collection[str]) -> dict[str, Any]:
    """Return CCA's settings in the checkpoint's config.json that TrainConfig has as well; options
    that are given, by their names, replace them.

    A given `group_size` is that of every layer. Another method and random weights take none.

    Raises:
        UserError: the saved groups depend on each sequence's length, which a run does not support.
    """
    from corecontext.integrations.hf.attention_interface import full_layers

    if not config.model or config.method != "cca" or config.strategy == "scratch":
        return {}
    hf_config = load_config(config.model)
    if not _saved_cca(hf_config):
        return {}
    saved = CCAConfig.from_dict(hf_config.cca)
    sizes_given = "group_size" in given or "layer_group_sizes" in given
    if saved.num_groups is not None and not sizes_given:
        raise UserError(
            f"group_size must be given for '{config.model}', whose groups are {saved.num_groups} "
            "at any length, got none. Use --group-size."
        )
    if saved.head_group_sizes is not None and not sizes_given:  # a run has sizes by layer
        saved = saved.replace(
            head_group_sizes=None,
            layer_group_sizes=(saved.head_group_sizes,) * len(full_layers(hf_config)),
        )
    names = {setting.name for setting in fields(TrainConfig)}
    if "group_size" in given:
        names.remove("layer_group_sizes")
    return {k: v for k, v in saved.to_dict().items() if k in names and v is not None}


def best_settings(config: TrainConfig, given: Collection[str]) -> dict[str, Any]:
    """Return the settings of the recipe `fetch` that the run supports, without options that are
    given.

    - There is no fetch from scratch, and none in context parallelism, where it sends all raw tokens
      to every process. A run without fetch has the preset "pooling", a rival its window alone.
    - `distil` needs trained weights, rows within the model's length, and one process a row.
    - SCHEDULE is for trained weights; its rows are cut to the model's length.
    """
    from corecontext.inference.limits import position_limit

    pooling = PRESETS["pooling"].settings
    if config.method != "cca":
        best = {name: pooling[name] for name in ("window_size", "fetch_groups")}
        return {name: value for name, value in best.items() if name not in given}
    if not config.model:
        return {}
    best = dict(RECIPES[DEFAULT_RECIPE])
    has_no_fetch = "fetch_groups" in given and not config.fetch_groups
    if has_no_fetch or config.strategy == "scratch" or config.context_parallel > 1:
        best |= pooling
    hf_config = load_config(config.model)
    limit = position_limit(hf_config)
    best["context_length"] = min(best["context_length"], limit or best["context_length"])
    is_too_long = "context_length" in given and _teaching_limit(config, hf_config) is not None
    if config.strategy == "scratch" or config.context_parallel > 1 or is_too_long:
        del best["distil"]
    if config.strategy == "scratch":
        best = {name: value for name, value in best.items() if name not in SCHEDULE}
    if "batch_size" in given:
        best.pop("accumulation", None)  # the user sets the rows of a step
    return {name: value for name, value in best.items() if name not in given}


def _teaching_limit(config: TrainConfig, hf_config: Any) -> int | None:
    """Return the model's length in tokens if a row exceeds it, else None: beyond it the model
    predicts too poorly to teach."""
    from corecontext.inference.limits import position_limit

    limit = position_limit(hf_config)
    if limit is None or config.context_length <= limit:
        return None
    return limit


def extend_context(hf_config: Any, rope_theta: float | None, context_length: int) -> None:
    """Set a config's rotary base, and raise its number of positions to the context length."""
    if rope_theta is not None:
        parameters = hf_config.rope_parameters
        # Models with several kinds of layers have parameters for each.
        nested = parameters.get("full_attention", parameters)
        if nested.get("rope_type", "default") != "default":
            raise UserError(
                "rope_theta must be left alone for a model with rope type "
                f"{nested['rope_type']!r}, whose scaling belongs to its base. Leave --rope-theta "
                "out."
            )
        nested["rope_theta"] = float(rope_theta)
    hf_config.max_position_embeddings = max(hf_config.max_position_embeddings or 0, context_length)


def make_tokenizer(config: TrainConfig, hf_config: Any) -> Any:
    """Return the model's tokenizer.

    Raises:
        UserError: the tokenizer is missing, or has more entries than the model.
    """
    from transformers import AutoTokenizer

    with one_line(f"tokenizer of '{config.model}' cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(config.model)
    if len(tokenizer) > hf_config.vocab_size:
        raise UserError(
            f"tokenizer must have at most the model's {hf_config.vocab_size} entries, got "
            f"{len(tokenizer)}."
        )
    return tokenizer


def make_model(config: TrainConfig, hf_config: Any, *, bfloat16: bool) -> Any:
    """Return the model, ready to train: trained weights in float32, frozen ones in bfloat16 where
    the arithmetic is (`bfloat16`).

    Raises:
        UserError: the weights are missing or do not fit.
    """
    from transformers import AutoModelForCausalLM

    from corecontext.integrations.hf.attention_interface import full_attention
    from corecontext.integrations.hf.rotation import fix_rotation

    torch.manual_seed(config.seed)
    with one_line(f"model '{config.model}' cannot be loaded"):
        if config.strategy == "scratch":
            model = AutoModelForCausalLM.from_config(
                hf_config, attn_implementation=full_attention(hf_config), dtype=torch.float32
            )
        else:
            mostly_frozen = config.strategy in ("partial", "lora")
            dtype = torch.bfloat16 if bfloat16 and mostly_frozen else torch.float32
            model = _load(config, hf_config, dtype)
        _make_savable(model.generation_config)
    model.config.use_cache = False  # during training
    # mutant training: a row is rotated by the longest document of its batch
    fix_rotation(model, config.context_length)
    if config.strategy == "partial":
        _train_only(model, PARTIAL_LAYERS)
    elif config.strategy == "lora":
        model = _add_lora(model, config)
    replace_attention(model, config)
    for parameter in model.parameters():  # also LoRA's, added to frozen layers
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def _load(config: TrainConfig, hf_config: Any, dtype: torch.dtype) -> Any:
    """Return the checkpoint's model; refuse weights that are missing or not finite."""
    try:
        model = load_weights(config.model, hf_config, dtype)
    except UserError as error:
        if not config.shape:
            raise
        raise UserError(
            "shape must leave the sizes of the checkpoint's weights with strategy "
            f"{config.strategy!r}, got {config.shape}: {error} Use --strategy scratch, or leave "
            "--shape out."
        ) from None
    check_finite(model, config.model)
    return model


def _make_savable(settings: Any) -> None:
    """Remove sampling settings from a greedy GenerationConfig: transformers does not save both.

    Raises:
        ValueError: another setting is invalid.
    """
    if not settings.do_sample:
        for name in ("temperature", *_CUTOFFS):
            setattr(settings, name, None)
    settings.validate(strict=True)


def replace_attention(model: Any, config: TrainConfig) -> None:
    """Replace the model's attention by the run's.

    Raises:
        UserError: the model does not support it.
    """
    if config.method == "full":
        return
    from corecontext.baselines import enable

    attention: Any = config.cca()
    if config.method != "cca":
        attention = pick_rival(config.method, {"window_size": config.window_size})
    with one_line():
        enable(model, attention, untested=config.untested)


def _train_only(model: Any, layer_names: tuple[str, ...]) -> None:
    """Freeze all weights but those of attention's linear layers with these names, or qkv_proj."""
    any_trained = False
    for name, module in model.named_modules():
        parent, _, layer = name.rpartition(".")
        trained = "attn" in parent and layer in (*layer_names, "qkv_proj")
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(trained)
            any_trained |= trained
    if not any_trained:
        raise UserError(
            f"strategy 'partial' needs layers {', '.join(layer_names)}, got none in "
            f"{type(model).__name__}."
        )


def _add_lora(model: Any, config: TrainConfig) -> Any:
    """Return the model in PEFT's wrapper, which trains LoRA's matrices alone."""
    try:
        import peft
    except ImportError:
        raise UserError(
            f"strategy 'lora' needs the package peft. Install it with: {install_command('train')}"
        ) from None
    with one_line():
        return peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                lora_dropout=0.0,
                bias="none",
                target_modules=list(config.lora_targets),
                task_type="CAUSAL_LM",
            ),
        )


def _with_cache_settings(cca: CCAConfig, saved: dict[str, Any]) -> CCAConfig:
    """Return a run's settings with the checkpoint's settings of caches, which no run trains. Skip
    those that do not suit the run's, such as fewer slots than groups to fetch."""
    for name in ("cache_dtype", "fetch_slots", "prefill"):
        if name in saved:
            with contextlib.suppress(ValueError):
                cca = cca.replace(**{name: saved[name]})
    return cca


def export(config: TrainConfig, saved: Path, target: Path, dtype: torch.dtype) -> None:
    """Write the trained weights of Trainer's checkpoint `saved` to `target`, an ordinary checkpoint
    in `dtype` that loads with CCA.

    LoRA's matrices are merged into a fresh copy of the model. Weights that strategy "partial" froze
    come from the original model, because training rounded them to bfloat16.
    """
    from corecontext.integrations.hf.enabling import enable

    if config.strategy == "lora":
        import peft

        model = load_weights(config.model, prepare_config(config), torch.float32)
        _make_savable(model.generation_config)
        model = peft.PeftModel.from_pretrained(model, str(saved)).merge_and_unload()
    else:
        model = load_weights(str(saved), load_config(str(saved)), torch.float32)
    if config.strategy == "partial" and dtype != torch.bfloat16:
        original = load_weights(config.model, prepare_config(config), dtype)
        _train_only(original, PARTIAL_LAYERS)
        frozen = {name: x for name, x in original.named_parameters() if not x.requires_grad}
        model.load_state_dict(frozen, strict=False)
    if config.method == "cca":
        cca = config.cca()
        if config.strategy != "scratch":
            cca = _with_cache_settings(cca, _saved_cca(load_config(config.model)))
        enable(model, cca, untested=config.untested, warn=False)
    model.config.use_cache = True
    model.to(dtype).save_pretrained(target)
