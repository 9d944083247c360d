"""Choose the KV heads that keep every token in a training run: before its first step, on its own
text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from corecontext.config import CCAConfig
from corecontext.data.packing import PackedRows
from corecontext.distributed.announcement import Announcement
from corecontext.files import UserError, cache_folder
from corecontext.heads.budget import COARSE, Shape, at_equal_cache, raw_heads, untrained_heads
from corecontext.heads.search import find_units, least_length
from corecontext.inference.limits import position_limit
from corecontext.integrations.hf.attention_interface import full_layers
from corecontext.integrations.hf.enabling import enable
from corecontext.integrations.hf.weights import check_finite, load_weights
from corecontext.loading import load_config, one_line
from corecontext.model_sizes import ModelSizes

PAPER = "Or train by the paper's rule, which needs none: --raw-heads 0."
ROWS = 64
"""Rows to look through, at most."""
DOCUMENTS = 4
"""Documents to search on: the longest of these rows."""
MOST_TOKENS = 8192
"""Tokens of each document, at most."""


def with_heads(
    run: Any,
    hf_config: Any,
    arguments: Any,
    rows: PackedRows,
    saved: dict[str, Any] | None,
) -> Any:
    """Replace a run's `raw_heads` by a window and sizes by head, the same in every process.

    Saved sizes are taken as they are. Else the first process searches while the others wait; for
    random weights the heads are fixed.

    Args:
        run: The run's settings, a TrainConfig.
        arguments: Of the trainer: device, bf16, and the processes.
        saved: Window and sizes that the run's folder has from an earlier start.

    Raises:
        UserError: the text is too short, or the cache has no room for as many heads.
    """
    if run.raw_heads == 0:
        return run
    if run.strategy == "scratch":
        sizes = _untrained(run, hf_config)
    elif arguments.world_size == 1:
        sizes = saved or _find(run, arguments, rows)
    else:
        sizes = _find_together(run, arguments, rows, saved)
    layers = [tuple(g) if isinstance(g, list) else g for g in sizes["layer_group_sizes"]]
    return run.replace(
        raw_heads=0, window_size=sizes["window_size"], layer_group_sizes=tuple(layers)
    )


def _find_together(
    run: Any, arguments: Any, rows: PackedRows, saved: dict[str, Any] | None
) -> dict[str, Any]:
    """Search in the first process, and tell the others."""
    announcement = Announcement("heads", arguments.process_index)
    sizes = saved
    if arguments.process_index == 0:
        try:
            sizes = saved or _find(run, arguments, rows)
        finally:
            announcement.publish(json.dumps(sizes))  # None after an error: the others must not wait
        return sizes
    sizes = json.loads(announcement.wait())
    if sizes is None:
        raise UserError("raw_heads could not be found; the first process says why.")
    return sizes


def _find(run: Any, arguments: Any, rows: PackedRows) -> dict[str, Any]:
    """Search on the checkpoint as it is at `run.model`, with its own rotary base."""
    hf_config = load_config(run.model)
    texts = _longest_documents(rows, run.cca(), position_limit(hf_config))
    with one_line(f"model '{run.model}' cannot be loaded"):
        dtype = torch.bfloat16 if arguments.bf16 else torch.float32
        model = load_weights(run.model, hf_config, dtype)
    check_finite(model, run.model)
    with one_line():
        enable(model.to(arguments.device).eval(), run.cca(), untested=run.untested, warn=False)
    texts = [text.to(arguments.device) for text in texts]
    try:
        options: dict[str, Any] = {"heads": True, "raw": True, "folder": cache_folder() / "heads"}
        findings = find_units(model, texts, run.context_length, run.raw_heads, **options)
    except UserError as error:
        raise UserError(f"raw_heads: {error} {PAPER}") from None
    del model
    if arguments.device.type == "cuda":
        torch.cuda.empty_cache()
    heads = ", ".join(map(str, findings.search.chosen))
    print(
        f"KV heads that keep every token (layer.head): {heads}; s = {findings.config.window_size} "
        f"for all, g = {COARSE * run.group_size} for the others"
    )
    return _sizes(findings.config)


def _untrained(run: Any, hf_config: Any) -> dict[str, Any]:
    """Return the sizes of a model with random weights."""
    shape = Shape(len(full_layers(hf_config)), ModelSizes.of(hf_config).kv_heads)
    count = run.raw_heads or raw_heads(shape, run.cca(), run.context_length)
    heads = untrained_heads(shape, count)
    try:
        return _sizes(at_equal_cache(shape, heads, run.cca(), run.context_length, raw=True))
    except ValueError as error:
        raise UserError(f"raw_heads: {error} {PAPER}") from None


def _sizes(config: CCAConfig) -> dict[str, Any]:
    """Return the window and the sizes by layer and head."""
    return {"window_size": config.window_size, "layer_group_sizes": config.layer_group_sizes}


def _longest_documents(rows: PackedRows, config: CCAConfig, limit: int | None) -> list[Tensor]:
    """Return the beginnings [1, n] of the longest documents in the first rows.

    Raises:
        UserError: no document is long enough to search on.
    """
    most = min(MOST_TOKENS, limit or MOST_TOKENS)
    num_rows = min(ROWS, len(rows))
    documents = []
    for i in range(num_rows):
        row = rows[i]
        ids = row["input_ids"]
        starts = (row["position_ids"] == 0).nonzero()[:, 0].tolist()
        for start, end in pairwise([*starts, len(ids)]):
            documents.append(ids[None, start : min(end, start + most)])
    documents.sort(key=lambda document: -document.shape[1])
    longest = documents[0].shape[1]
    least = least_length(config)
    if longest < least:
        raise UserError(
            f"data must have documents of {least} tokens or more in a row, whose second half has "
            "core tokens to see, to find the heads that shall keep every token; got "
            f"{longest} tokens at most in {num_rows} rows. Give longer text, a longer "
            f"--context-length or a smaller --window-size. {PAPER}"
        )
    return [document for document in documents[:DOCUMENTS] if document.shape[1] >= least]
