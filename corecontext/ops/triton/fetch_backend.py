"""Fetch by kernels: index keys as the kernels read them, the choice, attention and gradients on one
sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.config import parse_index
from corecontext.ops.fetch import index as fetch_index
from corecontext.ops.fetch import low_bits
from corecontext.ops.spec import Cores, Spec, Tokens, Upstream
from corecontext.ops.triton.attend import chosen as attention
from corecontext.ops.triton.attend.anywhere import rule_of
from corecontext.ops.triton.attend.chosen import Fetched, Kernels
from corecontext.ops.triton.attend.shares import Choosing
from corecontext.ops.triton.choose import index_keys
from corecontext.ops.triton.choose.select import choose


def fetch_unsupported_reason(spec: Spec, tokens: Tokens) -> str | None:
    """Return why the kernels cannot take the call, or None."""
    kind, _, bits = parse_index(spec.fetch_index)
    number = fetch_index.num_parts(spec.fetch_index, spec.group_size)
    if bits and spec.softcap is not None:
        return "a softcap acts on low bits with their centre"
    if kind in ("parts", "pairs") and spec.group_size % number:
        return f"{number} parts of {spec.group_size} tokens differ in size"
    return None


def fetch_attend(
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None,
    kernels: Kernels,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose groups and attend to their raw tokens, the core tokens of the other groups, first
    tokens and the window.

    Args:
        tokens: Raw tokens from position 0 on.

    Returns:
        out [N, r, T, D] in the dtype of q, log-sum-exp [N, r, T] in float32, and the choice [N, C,
        k] in int32: for each of the C shares that the queries touch the numbers of the chosen
        groups, counted as core tokens are, ascending, then -1.
    """
    start, end = tokens.q_start, tokens.q_start + tokens.q.shape[2]
    count = min(spec.fetch_groups, cores.k.shape[2])
    numbers = (spec.softcap, count, spec.fetch_share, start, end)
    settings = Choosing(rule_of(spec), spec.scale, *numbers)
    q, keys = _index(mean_queries(tokens.q, settings), tokens, cores, spec)
    choice = choose(q, keys, settings)
    fetched = Fetched(choice, spec.fetch_share)
    out, lse = attention.attend(tokens, cores, spec, core_bias, fetched, kernels)
    return out, lse, choice


def fetch_attend_backward(
    upstream: Upstream,
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    core_bias: Tensor | None,
    choice: Tensor,
) -> tuple[Tensor, ...]:
    """Return gradients as `packed.attend_backward` does, in float32, the same from run to run, for
    the choice of a forward."""
    fetched = Fetched(choice, spec.fetch_share)
    return attention.attend_backward(upstream, tokens, cores, spec, core_bias, fetched)


def mean_queries(q: Tensor, settings: Choosing) -> Tensor:
    """Return the mean query of each share, [N, r, C, D] in the dtype of q, from q [N, r, T, D]."""
    share = settings.share
    if share == 1:
        return q
    before = settings.q_start % share
    after = -settings.q_end % share
    num_queries = q.shape[2]
    if before or after:  # else no copy
        q = F.pad(q, (0, 0, before, after))
    total = q.unflatten(2, (-1, share)).sum(3, dtype=torch.float32)
    first = torch.arange(settings.num_shares, device=q.device) * share - before
    # Queries of each share that are in the call.
    end = (first + share).clamp(max=num_queries)
    count = end - first.clamp(min=0)
    return (total / count[:, None]).to(q.dtype)


def _index(q: Tensor, tokens: Tokens, cores: Cores, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return queries and index keys [N, M, p, D] whose products are the index scores, up to a
    constant."""
    kind, _, bits = parse_index(spec.fetch_index)
    g = spec.group_size
    first = spec.sinks
    centre = fetch_index.centre_of(tokens.k, spec)
    has_kernel = q.shape[3] <= index_keys.MAX_DIM
    if bits and has_kernel:
        rotation = low_bits.rotation(q.shape[3], q.dtype, q.device)
        k = tokens.k[:, first:]
        keys = index_keys.build(k, cores.k.shape[2], g, spec.fetch_index, centre)
        return q @ rotation, keys
    groups = tokens.k[:, first : first + cores.k.shape[2] * g].unflatten(1, (-1, g))
    index = fetch_index.build(groups, spec.fetch_index, centre)
    tensors = index.tensors
    if kind == "mean":
        return q, tensors[0][:, :, None]
    if bits:
        return fetch_index.as_products(index, q)
    return q, tensors[0]
