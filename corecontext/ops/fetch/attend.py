"""Attend to one sequence by a backend, with fetch where the settings and the sequence have it.

A backend may have an attribute `fetch`, a module with its own `encode`, `choose`, `attend`,
`attend_backward` and `gradients`. For others `query_blocks` has the same functions.
"""

from types import ModuleType

import torch
from torch import Tensor

from corecontext.ops.fetch import query_blocks
from corecontext.ops.fetch.choice import Choice, num_shares
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream


def encode(
    backend: ModuleType, keys: Tensor, centre: Tensor | None, spec: Spec
) -> tuple[Tensor, ...]:
    """Return what the index stores of groups, each [N, M, ...], from their raw keys [N, M, g, D];
    `centre` [N, D] is None for an index without one."""
    return _fetch_of(backend).encode(keys, centre, spec)


def attend(
    backend: ModuleType,
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None = None,
    choice: Choice | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Choice | None]:
    """Attend from a sequence's queries, under CCA where it has nothing to fetch.

    Args:
        mass: Added to the scores of core tokens, [N, 1, M], or None.
        choice: Groups that queries fetch; None chooses here.
        out: [N, r, T, D] of any strides, written in place; None makes one.

    Returns:
        out [N, r, T, D] and log-sum-exp [N, r, T], in the backend's dtypes, and the choice, None
        where nothing can be fetched.
    """
    if not _fetches(cores, spec):
        return *_written(backend.attend(tokens, cores, spec, mass), out), None
    if not hasattr(backend, "attend_backward"):  # the reference has fetch itself
        return *_written(backend.attend(tokens, cores, spec, mass, choice), out), choice
    fetch = _fetch_of(backend)
    spec, choice = _bounded(tokens, cores, spec, choice)
    if choice is None:
        choice = fetch.choose(tokens, cores.k.shape[2], spec)
    return *fetch.attend(tokens, cores, spec, mass, choice, out), choice


def _written(results: tuple[Tensor, Tensor], out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, the output written in place where one is given."""
    return results if out is None else (out.copy_(results[0]), results[1])


def attend_backward(
    backend: ModuleType,
    upstream: Upstream,
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None = None,
    choice: Choice | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v, core_k, core_v and masses, for the choice of a forward;
    without one it chooses again."""
    fetch = _fetch_of(backend)
    spec, choice = _bounded(tokens, cores, spec, choice)
    if tokens.q_start:
        # The backward of a backend takes whole sequences only.
        fetch = query_blocks
    elif not _fetches(cores, spec):
        return backend.attend_backward(upstream, tokens, cores, spec, mass)
    choice = _chosen(backend, tokens, cores, spec, choice)
    return fetch.attend_backward(upstream, tokens, cores, spec, mass, choice)


def gradients(
    backend: ModuleType,
    upstream: Upstream,
    tokens: Tokens,
    groups: Groups,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None = None,
    choice: Choice | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of a whole sequence, those through pooling too, for the
    choice of a forward; without one it chooses again."""
    if not _fetches(cores, spec):
        return backend.gradients(upstream, tokens, groups, cores, spec, mass)
    spec, choice = _bounded(tokens, cores, spec, choice)
    choice = _chosen(backend, tokens, cores, spec, choice)
    fetch = _fetch_of(backend)
    return fetch.gradients(upstream, tokens, groups, cores, spec, mass, choice)


def _bounded(
    tokens: Tokens, cores: Cores, spec: Spec, choice: Choice | None
) -> tuple[Spec, Choice | None]:
    """Return the settings with k at most the groups that there are, and shares at most as long as
    the sequence: memory and time follow the sequence, not the settings."""
    end = tokens.q_start + tokens.q.shape[2]
    # mutant fetch: a choice has room for groups that do not exist
    k = min(spec.fetch_groups, cores.k.shape[2])
    share = min(spec.fetch_share, end)
    if (k, share) != (spec.fetch_groups, spec.fetch_share):
        spec = spec.replace(fetch_groups=k, fetch_share=share)
    if choice is not None:
        choice = choice._replace(share=min(choice.share, end))
    return spec, choice


def _chosen(
    backend: ModuleType, tokens: Tokens, cores: Cores, spec: Spec, choice: Choice | None
) -> Choice:
    """Return the choice of a forward, or the one that it would have made."""
    if choice is not None:
        return choice
    if not _fetches(cores, spec):
        end = tokens.q_start + tokens.q.shape[2]
        count = num_shares(tokens.q_start, end, spec.fetch_share)
        shape = (tokens.q.shape[0], count, spec.fetch_groups)
        nothing = torch.full(shape, -1, dtype=torch.int32, device=tokens.q.device)
        return Choice(nothing, spec.fetch_share)
    return _fetch_of(backend).choose(tokens, cores.k.shape[2], spec)


def _fetches(cores: Cores, spec: Spec) -> bool:
    """Whether the sequence has groups to fetch."""
    return spec.fetch_groups > 0 and cores.k.shape[2] > 0


def _fetch_of(backend: ModuleType) -> ModuleType:
    """Return the functions of fetch for a backend."""
    return getattr(backend, "fetch", query_blocks)
