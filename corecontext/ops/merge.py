"""Merge partial softmaxes over disjoint sets of keys by their log-sum-exp."""

import torch
from torch import Tensor

# Elements of the output that `merge_into` merges at once, by device; on a CPU few enough that wide
# temporaries stay in the processor's cache.
_ELEMENTS = {"cpu": 1 << 19}
_ELEMENTS_DEFAULT = 1 << 22


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return one softmax over the union of the keys behind several partial results (docs/math.md,
    eq. 8).

    Args:
        outs: Partial outputs, each [..., T, D], of one dtype.
        lses: Their natural log-sum-exps, each [..., T], float32 or float64; -inf without any key.

    Returns:
        out [..., T, D] in the dtype of the parts, computed in that of the log-sum-exps; lse [...,
        T]. Rows without any key are 0 with lse -inf. Differentiable in all inputs.

    Raises:
        ValueError: no part, or as many outs as lses are not given.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge must get one lse per out and at least one of each, got {len(outs)} and "
            f"{len(lses)}."
        )
    stacked = torch.stack(lses)  # [parts, ..., T]
    highest = stacked.detach().amax(0)
    # A row with no key anywhere has -inf only; exp(-inf - -inf) would be NaN, forward and backward.
    # mutant merge: NaN where no part has a key
    # mutant merge: no shift by the maximum
    highest = torch.where(highest.isneginf(), 0.0, highest)
    weights = (stacked - highest).exp()
    total = weights.sum(0)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, total.log() + highest)
    # Divided by their own sum: exp(lse_i - lse) would put the rounding of lse into every output of
    # the row.
    # mutant 7: merge multiplies by exp(lse_i - lse)
    weights = weights / total
    out = outs[0].to(lse.dtype) * weights[0].unsqueeze(-1)
    for partial_out, weight in zip(outs[1:], weights[1:]):
        out = out + partial_out.to(lse.dtype) * weight.unsqueeze(-1)
    return out.to(outs[0].dtype), lse


def merge_into(out: Tensor, lse: Tensor, *results: tuple[Tensor, Tensor]) -> None:
    """Merge the results of other keys, each (out, lse), into out [N, r, T, D] and lse [N, r, T], in
    place, a few queries at a time: merging makes wide copies of its inputs."""
    elements = _ELEMENTS.get(out.device.type, _ELEMENTS_DEFAULT)
    outs, lses = zip((out, lse), *results)
    step = max(1, elements // max(1, out.shape[0] * out.shape[1] * out.shape[3]))
    for low in range(0, out.shape[2], step):
        rows = slice(low, low + step)
        out[:, :, rows], lse[:, :, rows] = merge(
            [x[:, :, rows] for x in outs], [x[:, :, rows] for x in lses]
        )
