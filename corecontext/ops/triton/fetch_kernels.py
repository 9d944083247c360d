"""Fetch by kernels on one sequence: the same functions as `ops.fetch.query_blocks`."""

import torch
from torch import Tensor

from corecontext.ops import compose
from corecontext.ops.fetch import query_blocks
from corecontext.ops.fetch.choice import Choice, mean_of_shares
from corecontext.ops.fetch.low_bits import LowBits
from corecontext.ops.fetch.scoring import centre_of, group_keys
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream
from corecontext.ops.triton.attend import anywhere, best
from corecontext.ops.triton.attend.anywhere import rule_of
from corecontext.ops.triton.attend.chosen import Call, add_raw_gradients, split, together
from corecontext.ops.triton.attend.shares import Choosing
from corecontext.ops.triton.choose import index_keys
from corecontext.ops.triton.choose.best_choice import best_choice
from corecontext.ops.triton.launch import on_device
from corecontext.ops.triton.pool.launcher import pool_backward

_MAX_KEY_DIM = 256  # elements of a key that a kernel can score


def choose(tokens: Tokens, num_groups: int, spec: Spec) -> Choice:
    """Choose the groups of each share of a sequence; by PyTorch where keys exceed _MAX_KEY_DIM.

    Args:
        tokens: All raw tokens from position 0 on.
        num_groups: Complete groups after the sinks: M.
    """
    if spec.index.key_dim(tokens.q.shape[3]) > _MAX_KEY_DIM:
        return query_blocks.choose(tokens, num_groups, spec)
    end = tokens.q_start + tokens.q.shape[2]
    k = min(spec.fetch_groups, num_groups)
    settings = Choosing(rule_of(spec), spec.scale, k, spec.fetch_share, tokens.q_start, end)
    means = mean_of_shares(tokens.q, tokens.q_start, spec.fetch_share)
    with on_device(tokens.q):
        centre = centre_of(tokens.k, spec)
        keys = _keys(tokens, num_groups, spec, centre)
        groups = best_choice(means, keys, centre, spec, settings)
    return Choice(groups, spec.fetch_share)


def _keys(tokens: Tokens, num_groups: int, spec: Spec, centre: Tensor | None) -> Tensor:
    """Return the index's keys [N, M, P, D'] in the dtype of the queries, without their centre."""
    index = spec.index
    dim = tokens.q.shape[3]
    if _has_kernels(spec, dim):
        keys = tokens.k[:, spec.sinks :]
        return index_keys.build(keys, num_groups, spec.group_size, index, centre)
    stored = index.encode(group_keys(tokens.k, spec, num_groups), centre)
    return index.decode(stored, index.key_dim(dim), tokens.q.dtype)


def encode(keys: Tensor, centre: Tensor | None, spec: Spec) -> tuple[Tensor, ...]:
    """Return the index of groups, by keys [N, M, g, D], as `Index.encode` does to store it."""
    if not keys.shape[1] or not _has_kernels(spec, keys.shape[3]):
        return spec.index.encode(keys, centre)
    with on_device(keys):
        return index_keys.encode(keys, spec.index, centre)


def _has_kernels(spec: Spec, dim: int) -> bool:
    """Whether kernels build the index: in low bits, of parts of one size."""
    index = spec.index
    is_even = spec.group_size % index.num_keys(spec.group_size) == 0
    return isinstance(index, LowBits) and is_even and dim <= index_keys.MAX_DIM


def attend(
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None,
    choice: Choice,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to sinks, raw tokens of chosen groups, core tokens of other groups and the window.

    Args:
        tokens: Raw tokens from position 0 on.
        cores: Core tokens of the groups behind the sinks.
        mass: Of the core tokens, [N, 1, M], or None.
        out: [N, r, T, D] of any strides, written in place; None makes one.

    Returns:
        out [N, r, T, D] in the dtype of q, log-sum-exp [N, r, T] in float32.
    """
    calls = split(Call(tokens, cores, spec, mass, choice))
    if out is None and len(calls) > 1:
        out = torch.empty_like(tokens.q, memory_format=torch.contiguous_format)
    with on_device(tokens.q):
        results = [_attend(call, None if out is None else out[rows]) for rows, call in calls]
    outs, lses = zip(*results)
    return outs[0] if out is None else out, torch.cat(lses) if len(lses) > 1 else lses[0]


def _attend(call: Call, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend for sequences whose marks fit into memory (`chosen.split`)."""
    marks = call.marks()
    out, lse = best.attend(*call[:4], marks, out)  # of `Call` all but the choice
    if out.numel() and call.choice.groups.shape[2]:
        best.attend_raw(call, marks, out, lse)
    return out, lse


def attend_backward(
    upstream: Upstream,
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None,
    choice: Choice,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v, core_k, core_v and masses of a whole sequence, in
    float32, the same from run to run; the choice has none."""
    calls = split(Call(tokens, cores, spec, mass, choice))
    with on_device(tokens.q):
        return together([_backward(upstream.map(lambda x, i=i: x[i]), call) for i, call in calls])


def _backward(upstream: Upstream, call: Call) -> tuple[Tensor | None, ...]:
    """Return the gradients of `attend_backward` for sequences whose marks fit into memory."""
    grads = anywhere.attend_backward(upstream, *call[:4], call.marks())
    add_raw_gradients(upstream, call, grads[:3], float(call.spec.scale))
    return grads


def gradients(
    upstream: Upstream,
    tokens: Tokens,
    groups: Groups,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None,
    choice: Choice,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of a whole sequence, for a choice."""
    with on_device(tokens.q):
        grads = best.gradients(upstream, tokens, groups, cores, spec, mass, choice)
        if grads is not None:
            return grads
        grads = attend_backward(upstream, tokens, cores, spec, mass, choice)
        return compose.through_pooling(grads, groups, spec, pool_backward)
