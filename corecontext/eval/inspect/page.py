"""A page to look around in a model's core tokens: one HTML file that needs no network."""

from __future__ import annotations

import base64
import json
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


def inspect_text(
    loaded: Loaded,
    name: str,
    text: str,
    max_tokens: int,
    count: int,
    positions: Sequence[int] = (),
    layers: Sequence[int] = (),
) -> str:
    """The page of a model reading a text: `count` evenly spaced queries, or those at
    `positions`."""
    ids = loaded.tokenizer(text, verbose=False)["input_ids"][:max_tokens]
    if not ids:
        raise UserError("text must have at least one token, got none.")
    count = min(count, len(ids))
    queries = sorted(set(positions)) or sorted(
        {round((i + 1) * len(ids) / count) - 1 for i in range(count)}
    )
    maps = attention_maps(loaded, torch.tensor([ids], device=loaded.model.device), queries, layers)
    return make_page(
        f"Core tokens of {Path(name).name}",
        split_text(loaded.tokenizer, ids),
        queries,
        maps,
        {"model": Path(name).name, "tokens": len(ids), **loaded.sizes()},
    )


def split_text(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character cut into several tokens comes with the last of
    them."""
    parts, begin = [], 0
    for i in range(len(ids)):
        piece = tokenizer.decode(ids[begin : i + 1], clean_up_tokenization_spaces=False)
        if piece.endswith("\ufffd") and i + 1 - begin < 4 and i + 1 < len(ids):
            parts.append("")
        else:
            parts.append(piece)
            begin = i + 1
    return parts


def make_page(
    title: str,
    tokens: Sequence[str],
    queries: Sequence[int],
    maps: Sequence[LayerMap],
    settings: Mapping[str, Any],
) -> str:
    """The page as text.

    Args:
        tokens: The text's tokens, as they are to be read.
        queries: Positions that the maps were made for.
        maps: In order.
        settings: What the page says of model and sizes.

    Raises:
        UserError: it would be larger than a browser likes.
    """
    size = (
        sum(2 * x.numel() for one in maps for x in (one.pooling, one.core, one.raw, one.first))
        * 4
        // 3
    )
    if size > MOST_BYTES:
        raise UserError(
            f"the page must hold at most {MOST_BYTES >> 20} MB, got {size >> 20}. Take fewer --layer, "
            "fewer --queries or a shorter text (--max-tokens)."
        )
    layers = []
    for one in maps:
        several = sum(other.layer == one.layer for other in maps) > 1
        layers.append(
            {
                "name": f"layer {one.layer}"
                + (f", heads with g = {one.group_size}" if several else ""),
                "group_size": one.group_size,
                "heads": one.core.shape[0],
                "numbers": one.heads,
                "groups": one.core.shape[2],
                "reach": one.raw.shape[2],
                "kept": one.first.shape[2],
                "shared": _shared(one),
                "pooling": _packed(one.pooling),
                "core": _packed(one.core),
                "raw": _packed(one.raw),
                "first": _packed(one.first),
            }
        )
    data = {
        "title": title,
        "tokens": list(tokens),
        "queries": list(queries),
        "layers": layers,
        "settings": {k: str(v) for k, v in settings.items()},
    }
    text = json.dumps(data, ensure_ascii=True).replace(
        "<", "\\u003c"
    )  # no token may end the script
    page = (
        resources.files("corecontext").joinpath("assets/inspect.html").read_text(encoding="utf-8")
    )
    return page.replace("/*DATA*/null", text)


def _shared(one: LayerMap) -> int:
    """How many neighbouring query heads share a core token: 1, or r."""
    heads, count = one.pooling.shape[0], 1
    while count < heads and one.used.numel() and torch.equal(one.used[count], one.used[0]):
        count += 1
    return count


def _packed(x: Tensor) -> str:
    """Float16, little-endian, base64."""
    return base64.b64encode(
        x.to(torch.float16).contiguous().numpy().astype("<f2").tobytes()
    ).decode()
