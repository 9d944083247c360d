"""Does a whole model decode right on this machine? Nothing is timed before this has passed."""

from __future__ import annotations

from typing import Any

import torch

from corecontext.bench.shapes import make_prompt
from corecontext.config import CCAConfig
from corecontext.inference import Engine
from corecontext.integrations.transformers import enabled

NEW_TOKENS = 8
TOLERANCE = 64  # times the spacing of the dtype's numbers, of the spread of the logits: rounding, not another token


@torch.no_grad()
def check_model(model: Any, config: CCAConfig) -> None:
    """Raise unless tokens made step by step are, within rounding, the likeliest under one pass without a cache.

    With an 8-bit cache the pass goes through one, too, since tokens are rounded on their way into it.
    """
    ids = make_prompt(model, 1, config.window_size + 4 * config.group_size + 3)
    with enabled(model, config):
        made = Engine(model, keep=0).generate(ids, max_new_tokens=NEW_TOKENS)[0]
        whole = torch.cat((ids, torch.tensor([made[:-1]], device=ids.device)), 1)
        logits = model(whole, use_cache=config.cache_dtype != "auto",
                       logits_to_keep=NEW_TOKENS).logits[0].float()
    gap = logits.max(-1).values - logits.gather(1, torch.tensor(made, device=ids.device)[:, None])[:, 0]
    allowed = TOLERANCE * torch.finfo(model.dtype).eps * logits.std(-1)
    if not bool((gap <= allowed).all()):  # also where it is NaN
        worst = int((gap / allowed).nan_to_num(torch.inf).argmax())
        raise AssertionError(f"decoding is wrong on this machine, nothing was timed: token {worst} is "
                             f"{float(gap[worst]):.2e} less likely than the best, allowed is "
                             f"{float(allowed[worst]):.2e}")
