"""The model that a run trains: loaded or made, its context extended, its attention replaced, and
what of it learns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from corecontext.config import CCAConfig
from corecontext.files import UserError
from corecontext.loading import check_architecture, load_config, one_line, pick_rival
from corecontext.train.train_config import RECIPES, TrainConfig

PARTIAL = ("q_proj", "k_proj", "v_proj")
"""W^Q, W^K and W^V; models with one matrix for all three call it qkv_proj."""
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "top_h",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)


def read_config(config: TrainConfig) -> Any:
    """The Hugging Face config of the run's model, with its shape, rotary base and length.

    Raises:
        UserError: there is no such model, or it cannot have these settings.
    """
    if not config.model:
        raise UserError(
            "model must be given, got none. Use --model FOLDER, or an identifier on the hub."
        )
    hf_config = load_config(config.model)
    check_architecture(hf_config)
    if config.distil:
        _check_teacher(config, hf_config)
    for name, value in config.shape.items():
        if not hasattr(hf_config, name):
            raise UserError(f"shape must name settings of {hf_config.model_type}, got {name!r}.")
        setattr(hf_config, name, value)
    if config.shape and config.strategy == "scratch":
        try:
            hf_config = type(hf_config)(
                **{k: v for k, v in hf_config.to_dict().items() if k != "model_type"}
            )
        except Exception as error:  # of a check by transformers, with the reason as its cause
            raise UserError(f"shape does not make a model: {error.__cause__ or error}") from None
    extend_context(hf_config, config.rope_theta, config.context_length)
    if getattr(hf_config, "attention_dropout", 0.0):
        hf_config.attention_dropout = 0.0  # attention weights are never formed
    if hasattr(hf_config, "cca") and (config.method != "cca" or config.strategy == "scratch"):
        del hf_config.cca  # else `enable` finds the learned parameters that it names
    held = (getattr(hf_config, "cca", None) or {}).get("learned") or ()
    if set(held) - set(config.learned):
        raise UserError(
            f"learned must name what '{config.model}' has learned, {', '.join(held)}, got "
            f"{', '.join(config.learned) or 'nothing'}: the rest would be lost."
        )
    return hf_config


def held_settings(config: TrainConfig, given: Collection[str]) -> dict[str, Any]:
    """CCA's settings in the checkpoint's config.json, as far as a run has them: what no option says
    stays.

    A `group_size` given is that of every layer. Another method, and random weights, take none of
    them.

    Raises:
        UserError: its groups follow from each sequence's length, which a run's cannot.
    """
    from corecontext.integrations.transformers import full_layers

    hf_config = load_config(config.model) if config.model else None
    saved = getattr(hf_config, "cca", None)
    if hf_config is None or saved is None or config.method != "cca" or config.strategy == "scratch":
        return {}
    held, sized = CCAConfig.from_dict(saved), "group_size" in given or "layer_group_sizes" in given
    if held.num_groups is not None and not sized:
        raise UserError(
            f"group_size must be given for '{config.model}', whose groups are {held.num_groups} at any "
            "length, got none. Use --group-size."
        )
    if held.head_group_sizes is not None and not sized:  # a run has them by layer
        held = held.replace(
            head_group_sizes=None,
            layer_group_sizes=(held.head_group_sizes,) * len(full_layers(hf_config)),
        )
    names = {one.name for one in fields(TrainConfig)} - (
        {"layer_group_sizes"} if "group_size" in given else set()
    )
    return {k: v for k, v in held.to_dict().items() if k in names and v is not None}


def best_settings(config: TrainConfig, given: Collection[str]) -> dict[str, Any]:
    """The recipe `raw`, as far as the run can have it and no option says otherwise.

    Rivals have none of it, a core token for each query head no sizes by head. Random weights cannot
    teach, nor can a model beyond its length, or where several processes share a row.
    """
    best = dict(RECIPES["raw"])
    if config.method != "cca" or not config.model:
        return {}
    if "layer_group_sizes" in given or config.core_heads != "kv":
        del best["raw_heads"]
    if (
        config.strategy == "scratch"
        or config.context_parallel > 1
        or not _can_teach(config, load_config(config.model))
    ):
        del best["distil"]
    return {name: value for name, value in best.items() if name not in given}


def _can_teach(config: TrainConfig, hf_config: Any) -> bool:
    """Whether rows are no longer than the model was built for: its predictions there are none to
    learn from."""
    from corecontext.inference.limits import position_limit

    limit = position_limit(hf_config)
    return limit is None or config.context_length <= limit


def _check_teacher(config: TrainConfig, hf_config: Any) -> None:
    """Raise where the model cannot teach rows of this length."""
    from corecontext.inference.limits import position_limit

    if not _can_teach(config, hf_config):
        raise UserError(
            f"context_length must be at most the model's {position_limit(hf_config)} tokens with distil "
            f"{config.distil:g}, got {config.context_length}: it cannot teach beyond them. Extend it by a "
            "run with --method full first, and distil from the result."
        )


def extend_context(hf_config: Any, rope_theta: float | None, context_length: int) -> None:
    """Give a config another rotary base, and room for so many positions."""
    if rope_theta is not None:
        parameters = hf_config.rope_parameters
        nested = parameters.get(
            "full_attention", parameters
        )  # models with several kinds of layers nest them
        if nested.get("rope_type", "default") != "default":
            raise UserError(
                f"rope_theta must be left alone for a model with rope type {nested['rope_type']!r}, whose "
                "scaling belongs to its base. Leave --rope-theta out."
            )
        nested["rope_theta"] = float(rope_theta)
    hf_config.max_position_embeddings = max(hf_config.max_position_embeddings or 0, context_length)


def make_tokenizer(config: TrainConfig, hf_config: Any) -> Any:
    """The model's tokenizer.

    Raises:
        UserError: there is none, or it has more entries than the model.
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
    """The model, ready to train: weights that learn in float32, the others in bfloat16 if the
    arithmetic is.

    Raises:
        UserError: the weights are missing or do not fit.
    """
    from transformers import AutoModelForCausalLM

    from corecontext.integrations.transformers import full_attention

    torch.manual_seed(config.seed)
    with one_line(f"model '{config.model}' cannot be loaded"):
        if config.strategy == "scratch":
            model = AutoModelForCausalLM.from_config(
                hf_config, attn_implementation=full_attention(hf_config), dtype=torch.float32
            )
        else:
            if config.shape:
                _check_sizes(config, hf_config)
            frozen = bfloat16 and config.strategy in ("partial", "lora")
            model = AutoModelForCausalLM.from_pretrained(
                config.model,
                config=hf_config,
                attn_implementation=full_attention(hf_config),
                dtype=torch.bfloat16 if frozen else torch.float32,
            )
        _make_savable(model.generation_config)
    model.config.use_cache = False  # while it trains
    if config.strategy == "partial":
        _train_only(model, PARTIAL)
    elif config.strategy == "lora":
        model = _add_lora(model, config)
    replace_attention(model, config)
    for parameter in model.parameters():  # what was added to a frozen layer learns, too
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def _make_savable(settings: Any) -> None:
    """Take out of a GenerationConfig what greedy generation leaves alone, and transformers refuses
    to save with it.

    Raises:
        ValueError: something else is wrong with it.
    """
    if not settings.do_sample:
        for name in _SAMPLING:
            setattr(settings, name, None)
    settings.validate(strict=True)


def _check_sizes(config: TrainConfig, hf_config: Any) -> None:
    """Raise where `shape` asks for weights of another size than the checkpoint has."""
    from transformers import AutoModelForCausalLM

    sizes = []
    with torch.device("meta"):
        for one in (load_config(config.model), hf_config):
            model = AutoModelForCausalLM.from_config(one)
            sizes.append({name: tuple(x.shape) for name, x in model.state_dict().items()})
    changed = [name for name in sizes[0] if sizes[1].get(name) != sizes[0][name]] or sorted(
        sizes[1].keys() - sizes[0]
    )
    if changed:
        raise UserError(
            f"shape must leave the sizes of the checkpoint's weights, got {config.shape} with strategy "
            f"{config.strategy!r}, which changes {changed[0]}. Use --strategy scratch, or leave "
            "--shape out."
        )


def replace_attention(model: Any, config: TrainConfig) -> None:
    """Give the model the run's attention.

    Raises:
        UserError: it cannot have it.
    """
    if config.method == "full":
        return
    from corecontext.baselines import enable

    chosen: Any = config.cca()
    if config.method != "cca":
        window_size = None if config.method == "longlora" else config.window_size
        chosen = pick_rival(config.method, None, window_size, None, None)
    with one_line():
        enable(model, chosen)


def _train_only(model: Any, endings: tuple[str, ...]) -> None:
    """Freeze everything but the linear layers of these names, or the joint one."""
    found = 0
    for name, module in model.named_modules():
        parts = name.rpartition(".")
        learns = "attn" in parts[0] and parts[2] in (*endings, "qkv_proj")
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(learns)
            found += learns
    if not found:
        raise UserError(
            f"strategy 'partial' needs layers {', '.join(endings)}, got none in {type(model).__name__}."
        )


def _add_lora(model: Any, config: TrainConfig) -> Any:
    """The model in PEFT's wrapper."""
    try:
        import peft
    except ImportError:
        raise UserError(
            "strategy 'lora' needs the package peft. Install corecontext[train]."
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


def export(
    config: TrainConfig, saved: Path, target: Path, tokenizer: Any, dtype: torch.dtype
) -> None:
    """Write the trained weights in `saved` (Trainer's) as an ordinary checkpoint that is loaded
    with CCA.

    LoRA's matrices are merged into a fresh copy of the model. What the strategy leaves alone comes
    from the model that the run began with: while it trained, that was rounded.
    """
    from transformers import AutoModelForCausalLM

    from corecontext.integrations.transformers import enable

    def loaded(name: str | Path, as_dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(name, dtype=as_dtype, **options)

    if config.strategy == "lora":
        import peft

        model = loaded(config.model, config=read_config(config))
        _make_savable(model.generation_config)
        model = peft.PeftModel.from_pretrained(model, str(saved)).merge_and_unload()
    else:
        model = loaded(saved)
        if config.strategy == "partial" and dtype != torch.bfloat16:
            first = loaded(config.model, dtype, config=read_config(config))
            _train_only(first, PARTIAL)
            model.load_state_dict(
                {name: x for name, x in first.named_parameters() if not x.requires_grad},
                strict=False,
            )
    if config.method == "cca":
        before = (
            {}
            if config.strategy == "scratch"
            else getattr(load_config(config.model), "cca", None) or {}
        )
        cache_dtype = before.get(
            "cache_dtype", CCAConfig.cache_dtype
        )  # no matter of training: it stays
        enable(
            model, config.cca().replace(cache_dtype=cache_dtype)
        )  # reads learned parameters, which stay behind
    model.config.use_cache = True
    model.to(dtype).save_pretrained(target)
    tokenizer.save_pretrained(target)
