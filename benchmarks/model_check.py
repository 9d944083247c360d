"""Does a whole model decode right on this machine? Nothing is timed before this has passed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import StaticCache

from benchmarks.shapes import make_prompt
from corecontext.config import CCAConfig
from corecontext.inference import Engine, prefill
from corecontext.integrations.transformers import enabled

NEW_TOKENS = 8


@torch.no_grad()
def check_model(model: Any, config: CCAConfig) -> None:
    """Raise unless steps on fixed buffers give the logits of one pass without a cache, within
    rounding, and the engine's steps, captured where that is done, the tokens that are the likeliest
    by those logits.

    With an 8-bit cache the pass goes through one, too, since tokens are rounded on their way into
    it.
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
                past_key_values=cache,
                position_ids=positions[:, None] + i,
            )
            steps.append(out.logits[0, -1].float())
    error = (torch.stack(steps) - logits).norm(dim=1) / logits.norm(dim=1)
    gap = (
        logits.max(-1).values
        - logits.gather(1, torch.tensor(made, device=ids.device)[:, None])[:, 0]
    )
    for name, found, allowed in (
        ("logits are off by", error, rounding),
        ("the token chosen is behind the likeliest by", gap / logits.std(-1), 8 * rounding),
    ):
        if not bool((found <= allowed).all()):  # also where it is NaN
            raise AssertionError(
                f"decoding is wrong on this machine, nothing was timed: {name} "
                f"{float(found.max()):.2e}, allowed is {allowed:.2e}"
            )
