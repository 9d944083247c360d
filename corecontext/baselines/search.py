"""Find each head's pattern for MInference: the one whose output on a sample text is nearest to full
attention's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corecontext.baselines.blocks import dense_attention
from corecontext.baselines.configs import MInference, Pattern
from corecontext.baselines.minference import sparse_attention
from corecontext.baselines.plugin import enabled
from corecontext.files import UserError, read_text, write_text


def candidates_for(budget: int, block_size: int = 64) -> list[Pattern]:
    """Patterns of each kind that let a query see about `budget` keys."""
    sizes = [max(1, budget * share // 16) for share in (1, 2, 4)]
    return [
        *(Pattern("a_shape", first, max(1, budget - first)) for first in sizes),
        *(
            Pattern("vertical_slash", first, max(1, budget - first))
            for first in (*sizes, max(1, budget * 3 // 4))
        ),
        Pattern("block_sparse", max(1, budget // block_size), 0),
    ]


def search_patterns(
    model: Any,
    input_ids: Tensor,
    candidates: Sequence[Pattern],
    *,
    block_size: int = 64,
    probe: int = 64,
) -> tuple[tuple[Pattern, ...], ...]:
    """The best of the candidates for each layer and query head, by relative error of the head's
    output.

    Each layer is judged on the inputs that full attention gives it.

    Args:
        model: A causal language model whose attention is its own.
        input_ids: [1, L], a text as long as those to come, at least `block_size` tokens.

    Returns:
        By layer and head, for `MInference`; layers that keep a sliding window get the first
        candidate, unused.
    """
    if input_ids.shape[1] < block_size:
        raise ValueError(
            f"input_ids must have at least {block_size} tokens, got {input_ids.shape[1]}. Take a longer "
            "text."
        )
    found: dict[int, tuple[Pattern, ...]] = {}

    def observe(
        layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> None:
        options = {"scale": scale, "softcap": softcap}
        exact = dense_attention(q, k, v, **options).float()
        errors = torch.stack(
            [
                torch.linalg.vector_norm(
                    sparse_attention(
                        q, k, v, [one] * q.shape[1], block_size=block_size, probe=probe, **options
                    ).float()
                    - exact,
                    dim=(0, 2, 3),
                )
                for one in candidates
            ]
        )
        found[layer] = tuple(candidates[i] for i in errors.argmin(0).tolist())

    with (
        enabled(model, MInference(block_size=block_size, probe=probe)) as handle,
        torch.inference_mode(),
    ):
        handle.observer = observe
        model.get_decoder()(input_ids, use_cache=False)
    heads = len(next(iter(found.values())))
    return tuple(found.get(i, (candidates[0],) * heads) for i in range(max(found) + 1))


def write_patterns(path: str | Path, patterns: Sequence[Sequence[Pattern]]) -> None:
    """Keep found patterns in a JSON file."""
    write_text(
        path,
        json.dumps([[dataclasses.asdict(one) for one in layer] for layer in patterns], indent=1)
        + "\n",
    )


def read_patterns(path: str | Path) -> tuple[tuple[Pattern, ...], ...]:
    """The inverse of `write_patterns`.

    Raises:
        UserError: the file is missing or holds no patterns.
    """
    try:
        return tuple(
            tuple(Pattern(**one) for one in layer) for layer in json.loads(read_text(str(path)))
        )
    except (ValueError, TypeError) as error:
        raise UserError(
            f"file '{path}' must hold patterns by layer and head, got something else: {error}"
        ) from None
