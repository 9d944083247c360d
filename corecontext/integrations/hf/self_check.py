"""Check CCA on a model of an untested architecture against the model's own full attention."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from corecontext.integrations.hf.cache_name import with_cache

GROUP_SIZE = 4
WINDOW_SIZE = 8
LENGTH = 40
"""Tokens: many groups are far past of the last ones."""
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest error of logits or keys by dtype, relative to their norm."""
LIMIT_OF_16_BITS = 0.05
POSITION = 7
"""Any but 0: where the rotation of keys is compared."""


@torch.no_grad()
def self_check(model: PreTrainedModel, enable: Callable[..., Any]) -> None:
    """Run a few random tokens through a model that is not enabled, and leave it so.

    Args:
        enable: Enables CCA with this group_size and window_size, and returns the handle.

    Raises:
        NotImplementedError: groups of one token differ from full attention, the cache from one
            pass, or the keys from those that the model's rotation gives.
    """
    device = model.get_input_embeddings().weight.device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, LENGTH), generator=generator).to(device)

    def logits(start: int = 0, stop: int = LENGTH, **options: Any) -> Tensor:
        return model(ids[:, start:stop], **options).logits.double()

    training = model.training
    model.eval()
    handle = None
    try:
        full = logits(use_cache=False)
        handle = enable(group_size=1, window_size=WINDOW_SIZE)
        _compare(model, "groups of one token against full attention", logits(use_cache=False), full)
        handle.configure(group_size=GROUP_SIZE)
        cache = DynamicCache(config=model.config)
        # Two chunks that end within a group, then steps of one token.
        edges = [0, 17, 22, *range(23, LENGTH + 1)]
        steps = [logits(*edge, **with_cache(cache)) for edge in itertools.pairwise(edges)]
        once = logits(use_cache=False)
        _compare(model, "the cache against one pass", torch.cat(steps, 1), once)
        _check_rotation(model, handle, ids[:, :1])
    finally:
        if handle is not None:
            handle.disable()
        # mutant plug-in: the self-check ends a model's training mode
        model.train(training)


def _check_rotation(model: PreTrainedModel, handle: Any, token: Tensor) -> None:
    """Check that keys at POSITION are those at 0, rotated. The sequence is one token, which attends
    to itself alone, so all else in the model is the same at both positions."""
    keys: list[Tensor] = []
    rotations: list[Any] = []

    def observe(
        index: int, q: Tensor, k: Tensor, v: Tensor, scale: Any, softcap: Any, rotary: Any, *_: Any
    ) -> None:
        keys.append(k.double())
        rotations.append(rotary)

    handle.observer = observe
    for position in (0, POSITION):
        model(token, position_ids=torch.full_like(token, position), use_cache=False)
    half = len(keys) // 2
    offset = torch.tensor([POSITION], device=token.device)
    for at_zero, key, rotary in zip(keys[:half], keys[half:], rotations):
        if handle.config.core_position == "middle":
            expected = at_zero if rotary is None else rotary.rotate(at_zero, offset)
            comparison = "keys against their rotation (core_position='token' needs none)"
            _compare(model, comparison, key, expected)


def _compare(model: PreTrainedModel, comparison: str, x: Tensor, expected: Tensor) -> None:
    """Raise NotImplementedError unless two tensors agree."""
    error = float((x - expected).norm() / expected.norm())
    limit = LIMITS.get(model.dtype, LIMIT_OF_16_BITS)
    # mutant plug-in: a model that fails the self-check is enabled
    if not error <= limit:
        raise NotImplementedError(
            f"architecture {model.config.model_type!r} does not pass the self-check of CCA "
            f"attention: {comparison} must be within {limit:.0e} of the norm in {model.dtype}, got "
            f"{error:.1e}."
        )
