"""What tests and benchmarks share: inputs, the plain PyTorch to be measured against, and the error
budget per row.

docs/numerics.md says why the budget looks as it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.ops.api import cca_attention
from corecontext.ops.rotary import Rotary
from corecontext.visibility import num_complete_groups, num_sinks, visible_cores_of


class Inputs(NamedTuple):
    """One call's tensors, and the gradients sent into its output and log-sum-exp (None: it is not
    differentiated)."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another dtype."""
        return Inputs(*(None if x is None else x.to(dtype) for x in self))


def make_inputs(
    seq_len: int,
    *,
    batch_size: int = 1,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    transposed: bool = False,
    with_lse: bool = True,
) -> Inputs:
    """Normal random inputs, equal on every device for one seed.

    Args:
        transposed: Strides as Hugging Face models make them: [B, L, H, D] in memory, seen as [B, H,
            L, D].
        with_lse: Give the log-sum-exp a gradient too. Fused backward kernels take none, so both
            ways need tests.

    Returns:
        q, grad_out [B, H, L, D]; k, v [B, Hkv, L, D]; grad_lse [B, H, L] in float32 (float64 for
        float64), or None.
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(heads: int) -> Tensor:
        x = torch.randn(
            batch_size,
            heads,
            seq_len,
            head_dim,
            generator=generator,
            dtype=torch.float64,
            device="cpu",
        )
        x = x.to(device, dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x

    q, k, v, grad_out = draw(num_heads), draw(num_kv_heads), draw(num_kv_heads), draw(num_heads)
    grad_lse = torch.randn(
        batch_size, num_heads, seq_len, generator=generator, dtype=torch.float64, device="cpu"
    )
    grad_lse = grad_lse.to(device, torch.promote_types(dtype, torch.float32)) if with_lse else None
    return Inputs(q, k, v, grad_out, grad_lse)


def plain_cca(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group_size: int,
    window_size: int,
    pooling: str = "cca",
    core_position: str = "middle",
    core_heads: str = "kv",
    rotary: Rotary | None = None,
    softcap: float | None = None,
    core_bias: Tensor | None = None,
    sink_size: int = 0,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """CCA as model code would write it in the inputs' own dtype: what errors are compared with.

    Core tokens and raw tokens in one masked matrix of scores. Arguments as in `cca_attention`.

    Args:
        fused: Take the output from `scaled_dot_product_attention` instead of an eager softmax.
    """
    seq_len, head_dim, repeats = q.shape[2], q.shape[3], q.shape[1] // k.shape[1]
    num_cores = num_complete_groups(seq_len, group_size)
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    groups_k, groups_v = (
        x[:, :, : num_cores * group_size].unflatten(2, (num_cores, group_size)) for x in (k, v)
    )
    capped = (lambda x: x) if softcap is None else (lambda x: softcap * torch.tanh(x / softcap))
    scores = capped(
        (groups_k @ q[:, :, group_size - 1 :: group_size, :, None])[..., 0] * head_dim**-0.5
    )
    if rotary is not None and core_position == "middle":
        groups_k = rotary.turn(
            groups_k, group_size // 2 - torch.arange(group_size, device=q.device)
        )
    if pooling == "max":
        core_k, core_v = groups_k.amax(3), groups_v.amax(3)
    else:
        weights = (
            scores.softmax(-1) if pooling == "cca" else torch.full_like(scores, 1 / group_size)
        )
        if core_heads == "kv":
            weights = weights.unflatten(1, (-1, repeats)).mean(2).repeat_interleave(repeats, 1)
        core_k, core_v = ((weights[..., None, :] @ x)[..., 0, :] for x in (groups_k, groups_v))
    keys, values = torch.cat((core_k, k), 2), torch.cat((core_v, v), 2)
    position = torch.arange(seq_len, device=q.device)[:, None]
    visible_cores = visible_cores_of(position, group_size, window_size)
    sinks, core = num_sinks(sink_size, group_size), torch.arange(num_cores, device=q.device)
    raw = ((visible_cores * group_size <= position.T) | (sinks > position.T)) & (
        position >= position.T
    )
    seen = torch.cat(((core < visible_cores) & (core >= sinks // group_size), raw), 1)
    scores = capped(q @ keys.mT * head_dim**-0.5)
    if core_bias is not None:
        scores = (
            scores
            + F.pad(core_bias.to(q.dtype)[:, None].expand(-1, num_cores), (0, seq_len))[:, None]
        )
    scores = scores.masked_fill(~seen, -torch.inf).to(torch.promote_types(q.dtype, torch.float32))
    if fused and softcap is None:
        mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -torch.inf)
        if core_bias is not None:
            mask = (
                mask
                + F.pad(
                    core_bias.detach().to(q.dtype)[:, None].expand(-1, num_cores), (0, seq_len)
                )[:, None]
            )
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask), scores.logsumexp(-1)
    return scores.softmax(-1).to(q.dtype) @ values, scores.logsumexp(-1)


def results_and_gradients(
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: Inputs,
    core_bias: Tensor | None = None,
    **settings: Any,
) -> dict[str, Tensor]:
    """out, lse and the gradients of q, k, v (and core_bias) of function(q, k, v, core_bias=...,
    **settings)."""
    leaves = {name: x.detach().requires_grad_() for name, x in zip("qkv", inputs)}
    if core_bias is not None:
        leaves["core_bias"] = core_bias.detach().clone().requires_grad_()
    out, lse = function(**leaves, **settings)
    outputs, into = [out], [inputs.grad_out]
    if inputs.grad_lse is not None:
        outputs, into = [out, lse], [inputs.grad_out, inputs.grad_lse.to(lse.dtype)]
    grads = torch.autograd.grad(outputs, list(leaves.values()), into, materialize_grads=True)
    found = {
        "out": out.detach(),
        "lse": lse.detach()[..., None],
    }  # a log-sum-exp is a row of one value
    return {**found, **{f"grad_{name}": grad for name, grad in zip(leaves, grads)}}


def assert_accurate(
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: Inputs,
    core_bias: Tensor | None = None,
    **settings: Any,
) -> None:
    """Hold results and gradients of function(q, k, v, core_bias=..., **settings) to the budget, row
    by row.

    Truth is the reference in float64. The plain error of a row is the larger one of eager and fused
    plain PyTorch, since a single one is now and then zero by luck. Roundings granted beyond it: two
    of the output (its parts, their merge); three of the log-sum-exp (two parts and their merge);
    two of the gradient of v (the log-sum-exp inside the weights, the sum); four of those of q and k
    (also dO . out and dO . v); for the core bias one of each term, added in quadrature.
    """
    wide_bias = None if core_bias is None else core_bias.double()
    truth = results_and_gradients(
        functools.partial(cca_attention, backend="reference", return_lse=True),
        inputs.to(torch.float64),
        wide_bias,
        **settings,
    )
    actual = results_and_gradients(function, inputs, core_bias, **settings)
    plain = [
        results_and_gradients(
            functools.partial(plain_cca, fused=fused), inputs, core_bias, **settings
        )
        for fused in (False, True)
    ]
    dtype, seq_len, head_dim = inputs.q.dtype, inputs.q.shape[2], inputs.q.shape[3]
    row = head_dim**0.5  # norm of a row of the inputs, whose elements are of size 1
    roundings = {
        "out": (2, row / 2),
        "lse": (3, 1.0),
        "grad_q": (4, row),
        "grad_k": (4, row),
        "grad_v": (2, row),
        "grad_core_bias": (1, row * (inputs.q.shape[1] * seq_len) ** 0.5),
    }
    for name, value in actual.items():
        plain_error = torch.stack([row_errors(run[name], truth[name]) for run in plain]).amax(0)
        assert_within_budget(value, truth[name], plain_error, name, dtype, *roundings[name])


def row_errors(x: Tensor, truth: Tensor) -> Tensor:
    """Distance of each row [..., D] from the truth, in float64."""
    return (x.double() - truth.double()).norm(dim=-1)


def assert_within_budget(
    actual: Tensor,
    truth: Tensor,
    plain_error: Tensor,
    name: str,
    dtype: torch.dtype,
    roundings: float = 1,
    size: float = 1.0,
    factor: float = 2.0,
) -> None:
    """Raise where a row's error exceeds `factor` times that of plain PyTorch plus a rounding or a
    few.

    Args:
        actual, truth: [..., T, D]; the truth in float64.
        plain_error: [..., T], the row errors of plain PyTorch at the same precision.
        dtype: Whose rounding is granted: that of the inputs.
        roundings: How many, each of the dtype's epsilon times the norm of the row.
        size: Least such norm; a row that cancels to less (the gradient of a query that sees one
            key is 0) still rounds terms of this size.

    Raises:
        AssertionError: names the worst row, its error and what it was allowed. NaN exceeds every
            budget.
    """
    error = row_errors(actual, truth)
    allowed = factor * plain_error + roundings * torch.finfo(dtype).eps * truth.double().norm(
        dim=-1
    ).clamp(min=size)
    bad = ~(error <= allowed)
    if bool(bad.any()):
        worst = torch.where(bad, error / allowed, 0).nan_to_num(torch.inf).argmax()
        row = [int(i) for i in torch.unravel_index(worst, error.shape)]
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()} rows exceed their budget; row {row} is off by "
            f"{float(error.flatten()[worst]):.3g}, allowed {float(allowed.flatten()[worst]):.3g} "
            f"(plain PyTorch: {float(plain_error.flatten()[worst]):.3g})."
        )


def effective_map(q: Tensor, k: Tensor, **settings: Any) -> Tensor:
    """The weight of every raw token in every output, core weights spread over their groups: [B, H,
    L, L].

    Outputs are linear in the values, so values that are unit vectors show the weights themselves;
    `cca_attention` is called once for every D tokens.
    """
    seq_len, head_dim = q.shape[2], q.shape[3]
    unit = torch.eye(-(-seq_len // head_dim) * head_dim, dtype=q.dtype, device=q.device)[:seq_len]
    columns = [
        cca_attention(q, k, part.expand_as(k).contiguous(), **settings)
        for part in unit.split(head_dim, 1)
    ]
    return torch.cat(columns, -1)[..., :seq_len]
