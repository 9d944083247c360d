"""Make inputs, plain PyTorch results and error budgets per row, for tests.

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
from corecontext.visibility import num_complete_groups, num_sinks, sees_core, sees_token


class Sizes(NamedTuple):
    """Sizes of the queries, and how many KV heads the keys have."""

    batch_size: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16


class PlainSettings(NamedTuple):
    """Settings of `plain_cca`, as in `cca_attention`."""

    group_size: int
    window_size: int
    core_position: str = "middle"
    rotary: Rotary | None = None
    softcap: float | None = None
    sink_size: int = 0
    core_mass: bool = False


class Inputs(NamedTuple):
    """One call's tensors, and the gradients of its output and log-sum-exp."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    """None: the log-sum-exp is not differentiated."""

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the same numbers in another dtype."""
        return Inputs(*(None if x is None else x.to(dtype) for x in self))


def make_inputs(
    seq_len: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    transposed: bool = False,
    with_lse: bool = True,
    **sizes: int,
) -> Inputs:
    """Draw normal random inputs, equal on every device for one seed.

    Args:
        transposed: Strides as Hugging Face models make them: [B, L, H, D] in memory, seen as [B, H,
            L, D].
        with_lse: Give the log-sum-exp a gradient too. Fused backward kernels take none, so both
            ways need tests.
        sizes: Fields of `Sizes`.

    Returns:
        q, grad_out [B, H, L, D]; k, v [B, Hkv, L, D]; grad_lse [B, H, L] in float32 (float64 for
        float64), or None.
    """
    batch_size, num_heads, num_kv_heads, head_dim = Sizes(**sizes)
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(
            batch_size, *shape, generator=generator, dtype=torch.float64, device="cpu"
        )

    tensors = []
    for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads):
        x = draw(heads, seq_len, head_dim).to(device, dtype)
        tensors.append(x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x)
    grad_lse = None
    if with_lse:
        wide = torch.promote_types(dtype, torch.float32)
        grad_lse = draw(num_heads, seq_len).to(device, wide)
    return Inputs(*tensors, grad_lse)


def plain_cca(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    fused: bool = False,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Compute CCA as model code would write it in the inputs' own dtype; errors are compared with
    its errors.

    Core tokens and raw tokens are in one masked matrix of scores.

    Args:
        fused: Take the output from `scaled_dot_product_attention` instead of an eager softmax.
        settings: Fields of `PlainSettings`.
    """
    chosen = PlainSettings(**settings)
    group_size = chosen.group_size
    seq_len, head_dim, repeats = q.shape[2], q.shape[3], q.shape[1] // k.shape[1]
    scale = head_dim**-0.5

    # Core tokens, one for each query head.
    num_cores = num_complete_groups(seq_len, group_size)
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    groups_k, groups_v = (
        x[:, :, : num_cores * group_size].unflatten(2, (num_cores, group_size)) for x in (k, v)
    )
    q_last = q[:, :, group_size - 1 :: group_size, :, None]
    weights = _cap((groups_k @ q_last)[..., 0] * scale, chosen.softcap).softmax(-1)
    if chosen.rotary is not None and chosen.core_position == "middle":
        offsets = group_size // 2 - torch.arange(group_size, device=q.device)
        groups_k = chosen.rotary.rotate(groups_k, offsets)
    weights = weights.unflatten(1, (-1, repeats)).mean(2).repeat_interleave(repeats, 1)
    core_k, core_v = ((weights[..., None, :] @ x)[..., 0, :] for x in (groups_k, groups_v))

    # One softmax over core tokens and raw tokens.
    keys, values = torch.cat((core_k, k), 2), torch.cat((core_v, v), 2)
    seen = _seen(seq_len, chosen, q.device)
    scores = _cap(q @ keys.mT * scale, chosen.softcap)
    if chosen.core_mass:
        scores = scores + F.pad(torch.special.entr(weights).sum(-1), (0, seq_len))[:, :, None]
    scores = scores.masked_fill(~seen, -torch.inf).to(torch.promote_types(q.dtype, torch.float32))
    lse = scores.logsumexp(-1)
    if not fused or chosen.softcap is not None or chosen.core_mass:
        return scores.softmax(-1).to(q.dtype) @ values, lse
    mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask), lse


def _cap(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _seen(seq_len: int, settings: PlainSettings, device: torch.device) -> Tensor:
    """Return the mask [L, M + L] of core tokens and raw tokens that queries see."""
    sizes = (settings.group_size, settings.window_size)
    position = torch.arange(seq_len, device=device)[:, None]
    sinks = num_sinks(settings.sink_size, settings.group_size)
    core = torch.arange(num_complete_groups(seq_len, settings.group_size), device=device)
    seen_cores = sees_core(core, position, *sizes) & (core >= sinks // settings.group_size)
    return torch.cat((seen_cores, sees_token(position.T, position, *sizes, sinks)), 1)


def results_and_gradients(
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: Inputs,
    **settings: Any,
) -> dict[str, Tensor]:
    """Return out, lse and the gradients of q, k, v of function(q, k, v, **settings)."""
    leaves = {name: x.detach().requires_grad_() for name, x in zip("qkv", inputs)}
    out, lse = function(**leaves, **settings)
    outputs = [out]
    grads_in = [inputs.grad_out]
    if inputs.grad_lse is not None:
        outputs.append(lse)
        grads_in.append(inputs.grad_lse.to(lse.dtype))
    grads = torch.autograd.grad(outputs, list(leaves.values()), grads_in, materialize_grads=True)
    # A log-sum-exp is a row of one value.
    results = {"out": out.detach(), "lse": lse.detach()[..., None]}
    return results | {f"grad_{name}": grad for name, grad in zip(leaves, grads)}


def assert_accurate(
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: Inputs,
    **settings: Any,
) -> None:
    """Hold results and gradients of function(q, k, v, **settings) to the budget, row by row.

    Truth is the reference in float64. The plain error of a row is the larger one of eager and fused
    plain PyTorch, since a single one is now and then zero by luck. Roundings granted beyond it: two
    of the output (its partial results, their merge); three of the log-sum-exp (two partial results
    and their merge); two of the gradient of v (the log-sum-exp inside the weights, the sum); four
    of those of q and k (also dO . out and dO . v).
    """
    reference = functools.partial(cca_attention, backend="reference", return_lse=True)
    truth = results_and_gradients(reference, inputs.to(torch.float64), **settings)
    actual = results_and_gradients(function, inputs, **settings)
    plain = [
        results_and_gradients(plain_cca, inputs, fused=fused, **settings) for fused in (False, True)
    ]
    head_dim = inputs.q.shape[3]
    row = head_dim**0.5  # norm of a row of the inputs, whose elements are of size 1
    roundings = {
        "out": (2, row / 2),
        "lse": (3, lse_size(inputs.q)),
        "grad_q": (4, row),
        "grad_k": (4, row),
        "grad_v": (2, row),
    }
    for name, value in actual.items():
        errors = torch.stack([row_errors(run[name], truth[name]) for run in plain]).amax(0)
        assert_within_budget(value, truth[name], errors, name, inputs.q.dtype, *roundings[name])


def lse_size(q: Tensor) -> Tensor:
    """Return the least size of each row's log-sum-exp: scores of a large query are sums of large
    products, even where they are near 0."""
    return (q.double().norm(dim=-1) / 8).clamp(min=1)


def row_errors(x: Tensor, truth: Tensor) -> Tensor:
    """Return the distance of each row [..., D] from the truth, in float64."""
    return (x.double() - truth.double()).norm(dim=-1)


def assert_within_budget(
    actual: Tensor,
    truth: Tensor,
    plain_error: Tensor,
    name: str,
    dtype: torch.dtype,
    roundings: float = 1,
    size: float | Tensor = 1.0,
    factor: float = 2.0,
) -> None:
    """Raise where a row's error exceeds `factor` times that of plain PyTorch plus some roundings.

    Args:
        actual, truth: [..., T, D]; the truth in float64.
        plain_error: [..., T], the row errors of plain PyTorch at the same precision.
        dtype: The inputs' dtype, whose roundings are granted.
        roundings: Their number, each of the dtype's epsilon times the norm of the row.
        size: Least such norm, of all rows or of each; a row that cancels to less (the gradient of a
            query that sees one key is 0) still rounds terms of this size.

    Raises:
        AssertionError: names the worst row, its error and what it was allowed. NaN exceeds every
            budget.
    """
    error = row_errors(actual, truth)
    norm = truth.double().norm(dim=-1).clamp(min=size)
    allowed = factor * plain_error + roundings * torch.finfo(dtype).eps * norm
    bad = ~(error <= allowed)
    if not bool(bad.any()):
        return
    worst = torch.where(bad, error / allowed, 0).nan_to_num(torch.inf).argmax()
    row = [int(i) for i in torch.unravel_index(worst, error.shape)]
    error, allowed, plain = (float(x.flatten()[worst]) for x in (error, allowed, plain_error))
    raise AssertionError(
        f"{name}: {int(bad.sum())} of {bad.numel()} rows exceed their budget; row {row} is off by "
        f"{error:.3g}, allowed {allowed:.3g} (plain PyTorch: {plain:.3g})."
    )


def effective_map(q: Tensor, k: Tensor, **settings: Any) -> Tensor:
    """Return the weight of every raw token in every output, [B, H, L, L]; core weights are spread
    over their groups.

    Outputs are linear in the values, so values that are unit vectors show the weights themselves;
    `cca_attention` is called once for every D tokens.
    """
    seq_len, head_dim = q.shape[2], q.shape[3]
    unit = torch.eye(-(-seq_len // head_dim) * head_dim, dtype=q.dtype, device=q.device)[:seq_len]
    columns = [
        cca_attention(q, k, values.expand_as(k).contiguous(), **settings)
        for values in unit.split(head_dim, 1)
    ]
    return torch.cat(columns, -1)[..., :seq_len]


def fed(layer, tensors, start, sizes, **options):
    """Outputs of appending pieces of the given sizes to a cache's layer, from a first token on."""
    outs = []
    for size in sizes:
        outs.append(layer.attend(*(x[:, :, start : start + size] for x in tensors), **options))
        start += size
    return torch.cat(outs, 2)
