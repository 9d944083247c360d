"""Is what is to be timed right on this machine? Nothing is timed before this has passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.decoding import check_decode
from benchmarks.methods import COMPRESSED, attend_cca, attend_with, make_inputs, rotary_for
from benchmarks.row_check import check_rows


def check_correct(
    methods: Sequence[str],
    sizes: dict[str, Any],
    group_size: int,
    window_size: int,
    *,
    longest: int,
    decoding: bool = False,
) -> dict[str, str]:
    """Raise unless what is to be timed is right: query by query as close to float64 as plain
    attention is.

    Args:
        sizes: query_heads, kv_heads, head_dim, batch, dtype and device.
        longest: Sampled rows of CCA are checked at this length too.
        decoding: Check a decoding step too.

    Returns:
        The methods that cannot run here or are wrong, and why; CCA is never among them.
    """
    sizes, (g, s) = {**sizes, "batch": 1}, (group_size, window_size)
    q, k, v = make_inputs(s + 4 * g + 3, **sizes)
    wide = q.double(), k.double(), v.double()
    truths = {
        True: attend_cca(*wide, g, s, backend="reference"),
        False: attend_with("full")(*wide, g, s),
    }
    usual = (attend_with("full")(q, k, v, g, s) - truths[False]).abs().amax(-1)
    missing = {}
    for method in methods:
        truth = truths[method in COMPRESSED]
        try:
            with torch.no_grad():
                out = attend_with(method)(q, k, v, g, s)
        except Exception as problem:
            if method == "cca":
                raise
            missing[method] = short(problem)
            continue
        error = (out - truth).abs().amax(-1)
        bound = 2 * usual.clamp(min=usual.median()) + torch.finfo(q.dtype).eps * truth.abs().amax(
            -1
        )
        if bool((error <= 4 * bound).all()):
            continue
        row = int((error / bound).nan_to_num(torch.inf).amax((0, 1)).argmax())
        wrong = (
            f"query {row} is off by {float(error[..., row].max()):.2e}, plain attention by "
            f"{float(usual.max()):.2e}"
        )
        if method == "cca":
            raise AssertionError(f"CCA is wrong on this machine, nothing was timed: {wrong}")
        missing[method] = f"wrong on this machine: {wrong}"
    q, k, v = make_inputs(longest, **sizes)
    with torch.no_grad():
        check_rows(attend_cca(q, k, v, g, s), q, k, v, rotary_for(q), group_size=g, window_size=s)
    if decoding:
        check_decode(sizes, g, s)
    return missing


def short(error: Exception) -> str:
    """One line of an error."""
    if isinstance(error, ImportError):
        return "not installed"
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:120]
