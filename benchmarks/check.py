"""Check the methods' results on this machine. Nothing is timed before this check has passed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.decoding import check_decode
from benchmarks.methods import (
    COMPRESSED,
    SETTINGS,
    Sizes,
    attend_cca,
    attend_with,
    make_inputs,
    spec_for,
)
from benchmarks.row_check import check_rows
from corecontext.ops.api import choose_backend


def check_correct(
    methods: Sequence[str],
    sizes: Sizes,
    group_size: int,
    window_size: int,
    *,
    longest: int,
    decoding: bool = False,
) -> dict[str, str]:
    """Raise AssertionError unless CCA is, query by query, as close to float64 as plain attention.

    Args:
        longest: Length at which sampled rows of CCA are checked too.
        decoding: Check a decoding step too.

    Returns:
        The other methods that cannot run here or are wrong, with the reason.
    """
    sizes = sizes._replace(batch=1)
    q, k, v = make_inputs(window_size + 4 * group_size + 3, sizes)
    q = (2 * q).round() / 2  # the mean of 16 is exact in half precision
    wide = (q.double(), k.double(), v.double())
    truth_of_full = attend_with("full")(*wide, group_size, window_size)
    usual = (attend_with("full")(q, k, v, group_size, window_size) - truth_of_full).abs().amax(-1)
    excluded = {}
    for method in methods:
        truth = truth_of_full
        few: dict[str, Any] = {}
        if "fetch" in method:
            # So few groups as here would all be fetched; exact scores choose alike in any dtype.
            few = {"fetch_groups": 1, "fetch_index": "oracle"}
            # By name, for "auto" reads short prompts whole.
            few["backend"] = choose_backend("auto", q)
        if method in COMPRESSED:
            settings = {**SETTINGS.get(method, {}), **few, "backend": "reference"}
            truth = attend_cca(*wide, group_size, window_size, **settings)
        try:
            with torch.no_grad():
                out = attend_with(method)(q, k, v, group_size, window_size, **few)
        except Exception as problem:
            if method == "cca":
                raise
            excluded[method] = short(problem)
            continue
        wrong = _wrong_row(out, truth, usual)
        if wrong and method == "cca":
            raise AssertionError(f"CCA is wrong on this machine, nothing was timed: {wrong}")
        if wrong:
            excluded[method] = f"wrong on this machine: {wrong}"
    q, k, v = make_inputs(longest, sizes)
    with torch.no_grad():
        out = attend_cca(q, k, v, group_size, window_size)
    check_rows(out, q, k, v, spec_for(q, group_size, window_size))
    if decoding:
        check_decode(sizes, group_size, window_size)
    return excluded


def _wrong_row(out: Tensor, truth: Tensor, usual: Tensor) -> str:
    """Return the query with the largest error, or "" where all errors are like plain attention's.

    Args:
        out, truth: [1, H, L, D].
        usual: [1, H, L], the error of plain attention in the same dtype.
    """
    error = (out - truth).abs().amax(-1)
    spacing = torch.finfo(out.dtype).eps * truth.abs().amax(-1)
    bound = 2 * usual.clamp(min=usual.median()) + spacing
    if bool((error <= 4 * bound).all()):
        return ""
    row = int((error / bound).nan_to_num(torch.inf).amax((0, 1)).argmax())
    return (
        f"query {row} is off by {float(error[..., row].max()):.2e}, plain attention by "
        f"{float(usual.max()):.2e}"
    )


def short(error: Exception) -> str:
    """Return one line of an error."""
    if isinstance(error, ImportError):
        return "not installed"
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:120]
