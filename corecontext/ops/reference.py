"""Specify the operator: docs/math.md written out densely, differentiable, in float32 or float64.

Memory grows with T x (M + S): this file is for reading and for comparison, not for long inputs.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.ops.fetch.choice import Choice
from corecontext.ops.spec import Cores, Groups, Spec, Tokens
from corecontext.visibility import sees_core, sees_token


def unsupported_reason(q: Tensor) -> str | None:
    """Return None: the reference takes every valid call."""
    return None


def _wide(x: Tensor) -> Tensor:
    """Return x in float32, or float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def _softcap(scores: Tensor, softcap: float | None) -> Tensor:
    """Return c tanh(score / c) for each score, c the softcap, or the scores where there is none."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def pool(groups: Groups, spec: Spec) -> Cores:
    """Pool groups into core tokens (docs/math.md, eq. 1 to 3).

    Args:
        spec: Only its scale, softcap and rotary are read.

    Returns:
        [N, 1, M, D], in float32 (float64 if given).
    """
    q_last, k, v = map(_wide, groups)
    group_size = k.shape[2]
    scores = _softcap(torch.einsum("nrmd,nmgd->nrmg", q_last, k) * spec.scale, spec.softcap)
    rotary = spec.rotary
    if rotary is not None:
        # mutant oracle: middle one token early
        k = rotary.rotate(k, group_size // 2 - torch.arange(group_size, device=k.device))
    weights = scores.softmax(-1).mean(1, keepdim=True)  # [N, 1, M, g]
    return Cores(*(torch.einsum("nrmg,nmgd->nrmd", weights, x) for x in (k, v)))


def pool_with_mass(groups: Groups, spec: Spec) -> tuple[Cores, Tensor | None]:
    """Return the core tokens of groups, and with `spec.core_mass` their masses."""
    return pool(groups, spec), mass_of(groups, spec) if spec.core_mass else None


def mass_of(groups: Groups, spec: Spec) -> Tensor:
    """Return the entropy of each core token's pooling weights, [N, 1, M] (docs/math.md, eq.
    14)."""
    q_last, k, _ = map(_wide, groups)
    scores = _softcap(torch.einsum("nrmd,nmgd->nrmg", q_last, k) * spec.scale, spec.softcap)
    log_weights = scores.log_softmax(-1)  # of each query head; below of their mean
    log_weights = log_weights.logsumexp(1, keepdim=True) - math.log(q_last.shape[1])
    return -(log_weights.exp() * log_weights).sum(-1)


def attend(
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None = None,
    choice: Choice | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to core tokens of the far past and raw tokens of the near past in one softmax, with
    fetch also to raw tokens of the groups chosen, instead of their core tokens (docs/math.md, eq.
    5, 13 and 15).

    Args:
        tokens: With fetch, raw tokens from position 0 on.
        cores: Core tokens of the groups n / g .. n / g + M - 1, n = `spec.sinks`.
        mass: Added to the scores of core tokens, [N, 1, M]; None for nothing.
        choice: Groups that queries fetch; None chooses here.

    Returns:
        out [N, r, T, D] and log-sum-exp [N, r, T], both float32 (float64 if given).
    """
    q, k, v = map(_wide, tokens[:3])
    core_k, core_v = map(_wide, cores)
    key_position = torch.arange(k.shape[1], device=q.device) + tokens.k_start
    if tokens.sink_k is not None:
        k = torch.cat((_wide(tokens.sink_k), k), 1)
        v = torch.cat((_wide(tokens.sink_v), v), 1)
        sink_position = torch.arange(tokens.sink_k.shape[1], device=q.device)
        key_position = torch.cat((sink_position, key_position))
    heads = q.shape[1]
    core_scores = _core_scores(q, core_k, spec, mass)
    local_scores = _softcap(q @ k[:, None].mT * spec.scale, spec.softcap)  # [N, r, T, S]
    position = torch.arange(q.shape[2], device=q.device) + tokens.q_start
    see_core, see_local = visible(position, key_position, core_k.shape[2], spec)
    if spec.fetch_groups and core_k.shape[2]:
        if choice is None:
            with torch.no_grad():
                marks = choose(q, position, see_core, k, spec)
        else:
            marks = marks_of(choice, position, see_core)
        see_core, see_local = fetched(marks, see_core, see_local, spec)
    scores = torch.cat(
        (
            core_scores.masked_fill(~see_core, -torch.inf),
            local_scores.masked_fill(~see_local, -torch.inf),
        ),
        -1,
    )
    weights_core, weights_local = scores.softmax(-1).split([core_k.shape[2], k.shape[1]], -1)
    out = _sum_seen(weights_core, see_core, core_v.expand(-1, heads, -1, -1)) + _sum_seen(
        weights_local, see_local, v[:, None].expand(-1, heads, -1, -1)
    )
    return out, scores.logsumexp(-1)


def _core_scores(q: Tensor, core_k: Tensor, spec: Spec, mass: Tensor | None) -> Tensor:
    """Return the scores of core tokens, [N, r, T, M]."""
    scores = q @ core_k.expand(-1, q.shape[1], -1, -1).mT * spec.scale
    scores = _softcap(scores, spec.softcap)
    if mass is not None:
        scores = scores + mass.to(q.dtype)[:, :, None]
    return scores


# Fetch


def group_keys(k: Tensor, spec: Spec, num_cores: int) -> Tensor:
    """Return the raw keys [N, M, g, D] of the groups that have core tokens, of k [N, S, D]."""
    k = k[:, spec.sinks : spec.sinks + num_cores * spec.group_size]
    return k.unflatten(1, (num_cores, spec.group_size))


def index_scores(q: Tensor, k: Tensor, num_groups: int, spec: Spec) -> Tensor:
    """Estimate the largest score of a token of each group for each query, [N, r, T, M]
    (docs/fetch.md), by the largest of the group's index keys. A softcap would change no order.

    Args:
        q: [N, r, T, D].
        k: Raw keys from position 0 on, [N, S, D].
        num_groups: Complete groups after the sinks: M.
    """
    index = spec.index
    count = spec.num_centred
    centre = k[:, spec.sinks : spec.sinks + count].mean(1) if count else None
    stored = index.encode(group_keys(k, spec, num_groups), centre)
    mapped = index.map_queries(q)
    keys = index.decode(stored, mapped.shape[3], q.dtype)
    products = torch.einsum("nrtd,nmpd->nrtmp", mapped, keys)
    offset = None if centre is None else index.centre_products(q, centre)
    if offset is not None:
        products = products + offset[..., None, None]
    return (products * spec.scale).amax(-1)


def choose(
    q: Tensor,
    position: Tensor,
    see_core: Tensor,
    k: Tensor,
    spec: Spec,
) -> Tensor:
    """Return marks [N, T, M], True for the k groups that each query fetches: of the groups visible
    to it those with the largest score of any query head, of equal ones the lower. Queries that
    share a choice have that of their mean, among the groups that the last of them sees, and drop
    those that they do not see themselves.

    Args:
        q: [N, r, T, D], at `position` [T].
        see_core: Groups that each query sees, [T, M].
        k: Raw keys from position 0 on, [N, S, D].
    """
    marks = torch.zeros_like(see_core).repeat(len(q), 1, 1)
    share_of_query = position // spec.fetch_share
    for share in share_of_query.unique():
        queries = (share_of_query == share).nonzero()[:, 0]
        mean = q[:, :, queries].mean(2, keepdim=True)
        estimates = index_scores(mean, k, see_core.shape[1], spec)
        # Visible groups are the first ones, so their places are their numbers.
        largest = estimates[:, :, 0, see_core[queries[-1]]].amax(1)  # [N, visible groups]
        best = largest.sort(stable=True, dim=-1, descending=True).indices[:, : spec.fetch_groups]
        best = best[:, None].expand(-1, len(queries), -1)
        marks[:, queries] = marks[:, queries].scatter(2, best, True)
    # mutant fetch: a group not seen yet is fetched, reference
    return marks & see_core


def marks_of(choice: Choice, position: Tensor, see_core: Tensor) -> Tensor:
    """Return the marks [N, T, M] of a choice that is given, as `choose` does."""
    share = position // choice.share - position[0] // choice.share
    groups = choice.groups.long()[:, share, :, None]  # [N, T, k, 1]
    number = torch.arange(see_core.shape[1], device=position.device)
    return (groups == number).any(2) & see_core


def fetched(marks: Tensor, see_core: Tensor, see_raw: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return which core tokens [N, 1, T, M] and raw tokens [N, 1, T, S] queries see with the marked
    groups [N, T, M] raw.

    Args:
        see_core, see_raw: Those that they see without fetch, [T, M] and [T, S].
    """
    raw = marks.repeat_interleave(spec.group_size, 2)
    before = spec.sinks
    raw = F.pad(raw, (before, see_raw.shape[1] - before - raw.shape[2]))
    # mutant fetch: a core token stays beside its raw tokens, reference
    return (see_core & ~marks)[:, None], (see_raw | raw)[:, None]


def _sum_seen(weights: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """Return weights @ values in which a NaN value reaches only the queries that see it (0 x NaN
    would reach all)."""
    nan = values.isnan()
    total = weights @ values.masked_fill(nan, 0)
    if not bool(nan.any()):
        return total
    return total.masked_fill(seen.to(values.dtype) @ nan.to(values.dtype) > 0, torch.nan)


def visible(
    position: Tensor, key_position: Tensor, num_cores: int, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Return the masks of the queries at `position` [T], True where they see: core tokens [T, M]
    and raw tokens [T, S]."""
    position = position[:, None]
    sizes = (spec.group_size, spec.window_size)
    core = torch.arange(num_cores, device=position.device)
    # mutant sinks: counted twice, reference
    core = core + spec.sinks // spec.group_size
    # mutant 2: a token not covered, reference
    # mutant 3: the next token is seen, reference
    see_local = sees_token(key_position, position, *sizes, spec.sinks)
    return sees_core(core, position, *sizes), see_local
