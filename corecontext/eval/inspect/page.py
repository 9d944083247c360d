"""Make a page that shows a model's core tokens: an HTML file that needs no network."""

import base64
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corecontext.eval.inspect.maps import LayerMap, attention_maps
from corecontext.files import UserError
from corecontext.loading import Loaded

MOST_BYTES = 64 << 20
"""Largest page that a browser shows in reasonable time."""
WEIGHTS = ("pooling", "core", "raw", "first", "fetched")
"""Fields of a `LayerMap` that the page holds."""


def inspect_text(
    loaded: Loaded,
    name: str,
    text: str,
    max_tokens: int,
    count: int,
    positions: Sequence[int] = (),
    layers: Sequence[int] = (),
) -> str:
    """Return the page of a model that reads a text.

    Args:
        name: The model's folder or identifier.
        max_tokens: Read the first tokens only.
        count: Number of evenly spaced queries, the last one at the last token.
        positions: Positions of the queries, in place of `count`.
        layers: Full-attention layers, counted from 0; all where empty.
    """
    ids = loaded.tokenizer(text, verbose=False)["input_ids"][:max_tokens]
    if not ids:
        raise UserError("text must have at least one token, got none.")
    queries = sorted(set(positions))
    if not queries:
        count = min(count, len(ids))
        queries = sorted({round((i + 1) * len(ids) / count) - 1 for i in range(count)})
    input_ids = torch.tensor([ids], device=loaded.model.device)
    maps = attention_maps(loaded, input_ids, queries, layers)
    model = Path(name).name
    settings = {"model": model, "tokens": len(ids), **loaded.sizes()}
    note = loaded.idle_note(len(ids))
    if note:
        print(note, file=sys.stderr)
        settings["note"] = note
    tokens = split_text(loaded.tokenizer, ids)
    return make_page(f"Core tokens of {model}", tokens, queries, maps, settings)


def split_text(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; a character of several tokens comes with the last."""
    pieces = []
    start = 0
    for i in range(len(ids)):
        piece = tokenizer.decode(ids[start : i + 1], clean_up_tokenization_spaces=False)
        # A character is at most 4 bytes, and so at most 4 tokens.
        is_incomplete = piece.endswith("\ufffd") and i + 1 - start < 4
        if is_incomplete and i + 1 < len(ids):
            pieces.append("")
        else:
            pieces.append(piece)
            start = i + 1
    return pieces


def make_page(
    title: str,
    tokens: Sequence[str],
    queries: Sequence[int],
    maps: Sequence[LayerMap],
    settings: Mapping[str, Any],
) -> str:
    """Return the page as HTML.

    Args:
        tokens: The text's tokens, in readable form.
        queries: The positions of the maps' queries.
        maps: In the order of layers.
        settings: Model and sizes, to show.

    Raises:
        UserError: the page would be too large for a browser.
    """
    numbers = sum(getattr(layer_map, name).numel() for layer_map in maps for name in WEIGHTS)
    size = 2 * numbers * 4 // 3  # float16, of which base64 makes 4 bytes of 3
    if size > MOST_BYTES:
        raise UserError(
            f"the page must hold at most {MOST_BYTES >> 20} MB, got {size >> 20}. Take fewer "
            "--layer, fewer --queries or a shorter text (--max-tokens)."
        )
    maps_of_layer = Counter(layer_map.layer for layer_map in maps)
    data = {
        "title": title,
        "tokens": list(tokens),
        "queries": list(queries),
        "layers": [_map_data(layer_map, maps_of_layer[layer_map.layer] > 1) for layer_map in maps],
        "settings": {name: str(value) for name, value in settings.items()},
    }
    text = json.dumps(data, ensure_ascii=True)
    # The page has the data in a script, which a token such as "</script>" would end.
    # mutant inspect: a token can end the script
    text = text.replace("<", "\\u003c")
    asset = resources.files("corecontext").joinpath("assets/inspect.html")
    return asset.read_text(encoding="utf-8").replace("/*DATA*/null", text)


def _map_data(layer_map: LayerMap, is_part: bool) -> dict[str, Any]:
    """Return a map as plain values under the names of the page's script.

    Args:
        is_part: Whether the map has only those heads of its layer that share a group size.
    """
    title = f"layer {layer_map.layer}"
    if is_part:
        title += f", heads with g = {layer_map.group_size}"
    return {
        "name": title,
        "group_size": layer_map.group_size,
        "heads": layer_map.core.shape[0],
        "numbers": layer_map.heads,
        "groups": layer_map.core.shape[2],
        "reach": layer_map.raw.shape[2],
        "kept": layer_map.first.shape[2],
        "shared": _heads_per_core(layer_map),
        "fetches": layer_map.fetched.numel() > 0,
        **{name: _packed(getattr(layer_map, name)) for name in WEIGHTS},
    }


def _heads_per_core(layer_map: LayerMap) -> int:
    """Return how many neighbouring query heads share a core token: 1, or r."""
    used = layer_map.used
    count = 1
    while count < len(used) and used.numel() and torch.equal(used[count], used[0]):
        count += 1
    return count


def _packed(x: Tensor) -> str:
    """Return float16 numbers, little-endian, in base64."""
    return base64.b64encode(x.to(torch.float16).numpy().astype("<f2").tobytes()).decode()
