"""Search each head's pattern for MInference: the nearest to full attention on a sample text."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corecontext.baselines.hook import enabled
from corecontext.baselines.method import Call, Method
from corecontext.files import UserError, read_text, write_text
from reproduction.attentions.dense import dense_attention
from reproduction.attentions.minference import Pattern, sparse_attention


def search_patterns(
    model: Any,
    input_ids: Tensor,
    candidates: Sequence[Pattern],
    *,
    block_size: int = 64,
    probe: int = 64,
) -> tuple[tuple[Pattern, ...], ...]:
    """Choose a candidate for each layer and query head by the relative error of the head's output.

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
            f"input_ids must have at least {block_size} tokens, got {input_ids.shape[1]}. "
            "Take a longer text."
        )
    chosen: dict[int, tuple[Pattern, ...]] = {}

    class Search(Method):
        """Full attention that compares every candidate with itself on the way."""

        name = "minference"

        def attend(self, call: Call) -> Tensor:
            """Return full attention, and choose each head's pattern in this layer."""
            q, k, v, scoring = call[:4]
            exact = dense_attention(q, k, v, scoring)
            errors = []
            for pattern in candidates:
                out = sparse_attention(q, k, v, [pattern] * q.shape[1], scoring, block_size, probe)
                difference = out.float() - exact.float()
                errors.append(torch.linalg.vector_norm(difference, dim=(0, 2, 3)))
            best = torch.stack(errors).argmin(0).tolist()
            chosen[call.layer.index] = tuple(candidates[i] for i in best)
            return exact

    with enabled(model, Search()), torch.inference_mode():
        model.get_decoder()(input_ids, use_cache=False)
    heads = len(next(iter(chosen.values())))
    return tuple(chosen.get(i, (candidates[0],) * heads) for i in range(max(chosen) + 1))


def write_patterns(path: str | Path, patterns: Sequence[Sequence[Pattern]]) -> None:
    """Write patterns to a JSON file."""
    plain = [[dataclasses.asdict(pattern) for pattern in layer] for layer in patterns]
    write_text(path, json.dumps(plain, indent=1) + "\n")


def read_patterns(path: str | Path) -> tuple[tuple[Pattern, ...], ...]:
    """Read the file of `write_patterns`.

    Raises:
        UserError: the file is missing or holds no patterns.
    """
    try:
        layers = json.loads(read_text(str(path)))
        return tuple(tuple(Pattern(**values) for values in layer) for layer in layers)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"file '{path}' must hold patterns by layer and head, got something else: {error}"
        ) from None
