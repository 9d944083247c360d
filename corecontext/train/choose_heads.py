"""The KV heads that keep every token in a run: found before its first step, on its own text, and
kept with the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corecontext.config import CCAConfig
from corecontext.data.packing import PackedRows
from corecontext.data.row_stream import StreamedRows
from corecontext.distributed.announcement import Announcement
from corecontext.files import UserError
from corecontext.heads.budget import COARSE, Shape, at_equal_cache, raw_heads, untrained_heads
from corecontext.heads.search import find_units, least_length
from corecontext.inference.limits import position_limit
from corecontext.integrations.transformers import enable, full_attention, full_layers
from corecontext.loading import load_config, one_line
from corecontext.model_sizes import ModelSizes
from corecontext.train.folder import held_heads
from corecontext.train.train_config import TrainConfig

PAPER = "Or train by the paper's rule, which needs none: --raw-heads 0."
ROWS, DOCUMENTS, MOST_TOKENS = 64, 4, 8192
"""Rows that are looked through, documents taken from them, and tokens of each."""


def with_heads(
    config: TrainConfig, hf_config: Any, arguments: Any, rows: PackedRows | StreamedRows
) -> TrainConfig:
    """The run with the sizes by head that `raw_heads` stands for, the same in every process.

    They are those that the run's folder has, or else the first process looks for them while the
    others wait. Random weights take theirs unseen.

    Raises:
        UserError: the text is too short, or the cache has no room for as many.
    """
    if config.raw_heads == 0:
        return config
    found = held_heads(Path(config.output))
    if config.strategy == "scratch":
        found = _sizes(_untrained(config, hf_config))
    elif arguments.world_size == 1:
        found = found or _find(config, arguments, rows)
    else:
        announcement = Announcement("heads", arguments.process_index)
        if arguments.process_index == 0:
            try:
                found = found or _find(config, arguments, rows)
            finally:
                announcement.publish(json.dumps(found))
        else:
            found = json.loads(announcement.wait())
            if found is None:
                raise UserError("raw_heads could not be found; the first process says why.")
    sizes = tuple(
        tuple(one) if isinstance(one, list) else one for one in found["layer_group_sizes"]
    )
    return config.replace(raw_heads=0, window_size=found["window_size"], layer_group_sizes=sizes)


def _find(config: TrainConfig, arguments: Any, rows: PackedRows | StreamedRows) -> dict[str, Any]:
    """`window_size` and `layer_group_sizes` for the model as it lies at `config.model`, its rotary
    base its own."""
    from transformers import AutoModelForCausalLM

    hf_config = load_config(config.model)
    if hasattr(hf_config, "cca"):
        del hf_config.cca  # else `enable` finds the learned parameters that it names
    texts = _texts(rows, config.cca(), position_limit(hf_config))
    with one_line(f"model '{config.model}' cannot be loaded"):
        model = AutoModelForCausalLM.from_pretrained(
            config.model,
            config=hf_config,
            attn_implementation=full_attention(hf_config),
            dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
        )
    with one_line():
        enable(model.to(arguments.device).eval(), config.cca().replace(learned=()))
    try:
        found = find_units(
            model,
            [text.to(arguments.device) for text in texts],
            config.context_length,
            config.raw_heads,
            heads=True,
            raw=True,
        )
    except UserError as error:
        raise UserError(f"raw_heads: {error} {PAPER}") from None
    del model
    if arguments.device.type == "cuda":
        torch.cuda.empty_cache()
    heads = ", ".join(map(str, found.search.chosen))
    print(
        f"KV heads that keep every token (layer.head): {heads}; s = {found.config.window_size} for all, "
        f"g = {COARSE * config.group_size} for the others"
    )
    return _sizes(found.config)


def _untrained(config: TrainConfig, hf_config: Any) -> CCAConfig:
    """The same for random weights."""
    shape = Shape(len(full_layers(hf_config)), ModelSizes.of(hf_config).kv_heads)
    count = config.raw_heads or raw_heads(shape, config.cca(), config.context_length)
    try:
        return at_equal_cache(
            shape, untrained_heads(shape, count), config.cca(), config.context_length, raw=True
        )
    except ValueError as error:
        raise UserError(f"raw_heads: {error} {PAPER}") from None


def _sizes(config: CCAConfig) -> dict[str, Any]:
    return {"window_size": config.window_size, "layer_group_sizes": config.layer_group_sizes}


def _texts(rows: PackedRows | StreamedRows, config: CCAConfig, limit: int | None) -> list[Tensor]:
    """The beginnings [1, n] of the longest documents in the first rows, those long enough.

    Raises:
        UserError: none is.
    """
    before = rows.state_dict(0) if isinstance(rows, StreamedRows) else None
    most, pieces = min(MOST_TOKENS, limit or MOST_TOKENS), []
    for i in range(min(ROWS, len(rows))):
        row = rows[i]
        edges = [*(row["position_ids"] == 0).nonzero()[:, 0].tolist(), len(row["input_ids"])]
        pieces += [
            row["input_ids"][None, first : min(end, first + most)]
            for first, end in zip(edges, edges[1:])
        ]
    if isinstance(rows, StreamedRows) and before is not None:
        rows.load_state_dict(before)
    longest = sorted(pieces, key=lambda piece: -piece.shape[1])[:DOCUMENTS]
    least = least_length(config)
    if longest[0].shape[1] < least:
        raise UserError(
            f"data must have documents of {least} tokens or more in a row, whose second half has core "
            f"tokens to see, to find the heads that shall keep every token; got {longest[0].shape[1]} "
            f"tokens at most in {min(ROWS, len(rows))} rows. Give longer text, a longer --context-length "
            f"or a smaller --window-size. {PAPER}"
        )
    return [piece for piece in longest if piece.shape[1] >= least]
