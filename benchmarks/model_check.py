"""Check that a whole model decodes right on this machine. Nothing is timed before it has passed."""

from typing import Any

import torch
from transformers import StaticCache

from benchmarks.shapes import make_prompt
from corecontext.config import CCAConfig
from corecontext.inference import Engine, prefill
from corecontext.integrations.hf.cache_name import with_cache
from corecontext.integrations.hf.enabling import enabled

NEW_TOKENS = 8


@torch.no_grad()
def check_model(model: Any, config: CCAConfig) -> None:
    """Raise AssertionError unless decoding agrees with one pass without a cache, within rounding.

    Steps on fixed buffers must give its logits, and the engine's steps, captured on a GPU, its
    likeliest tokens. With an 8-bit cache the pass uses one too, since it rounds what it stores.
    """
    ids = make_prompt(model, 1, config.window_size + 4 * config.group_size + 3)
    rounding = max(8 * torch.finfo(model.dtype).eps, 1e-4)
    with enabled(model, config):
        made = Engine(model, keep=0).generate(ids, max_new_tokens=NEW_TOKENS)[0]
        whole = torch.cat((ids, torch.tensor([made[:-1]], device=ids.device)), 1)
        logits = (
            model(whole, use_cache=config.cache_dtype != "auto", logits_to_keep=NEW_TOKENS)
            .logits[0]
            .float()
        )
        cache = StaticCache(model.config, max_cache_len=whole.shape[1])
        first, cache, positions = prefill(model, ids, cache=cache)
        steps = [first[0].float()]
        for i, token in enumerate(made[:-1]):
            out = model(
                ids.new_tensor([[token]]),
                **with_cache(cache),
                position_ids=positions[:, None] + i,
            )
            steps.append(out.logits[0, -1].float())
    error = (torch.stack(steps) - logits).norm(dim=1) / logits.norm(dim=1)
    chosen = logits.gather(1, torch.tensor(made, device=ids.device)[:, None])[:, 0]
    gap = (logits.max(-1).values - chosen) / logits.std(-1)
    _check("logits are off by", error, rounding)
    _check("the token chosen is behind the likeliest by", gap, 8 * rounding)


def _check(text: str, values: torch.Tensor, allowed: float) -> None:
    """Raise unless all values are at most as large as allowed, also where one is NaN."""
    if not bool((values <= allowed).all()):
        raise AssertionError(
            f"decoding is wrong on this machine, nothing was timed: {text} "
            f"{float(values.max()):.2e}, allowed is {allowed:.2e}"
        )
