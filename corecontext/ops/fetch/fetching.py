"""Let a backend fetch: its pooling as it is, its attention with the raw tokens of chosen groups."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from corecontext.ops import compose
from corecontext.ops.fetch import query_blocks
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream


def with_fetch(
    module: ModuleType, spec: Spec, choices: list[Tensor] | None = None
) -> ModuleType | FetchBackend:
    """Return a backend as it is, or with fetch where the settings have it; the reference has fetch
    itself.

    Args:
        choices: What an earlier `FetchBackend.choices` of the same call has collected.
    """
    if not spec.fetch_groups or not hasattr(module, "attend_backward"):
        return module
    return FetchBackend(module, choices)


class FetchBackend:
    """A backend's functions on the sequences of one call, its attention with fetch.

    The attention is the backend's own, `fetch_attend` and `fetch_attend_backward`, where it has
    them and they take the call, else that of `query_blocks`.
    """

    def __init__(self, module: ModuleType, choices: list[Tensor] | None = None) -> None:
        self.module = module
        self.choices = choices or []
        """Groups fetched, [N, C, k] in int32, of each sequence that fetches, in order."""

    def __getattr__(self, name: str) -> Any:
        """Return a function of the backend: its pooling and its masses."""
        return getattr(self.module, name)

    def attend(
        self, tokens: Tokens, cores: Cores, spec: Spec, core_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend as a backend does, and collect the choice."""
        if not _fetches(cores, spec):
            return self.module.attend(tokens, cores, spec, core_bias)
        attend, _ = self._functions(tokens, spec)
        out, lse, choice = attend(tokens, cores, spec, core_bias)
        self.choices.append(choice)
        return out, lse

    def attend_backward(
        self,
        upstream: Upstream,
        tokens: Tokens,
        cores: Cores,
        spec: Spec,
        core_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return gradients as a backend does, for the first choice collected, which it takes away;
        without any it chooses again."""
        fetches = _fetches(cores, spec)
        if not fetches and not tokens.q_start:
            return self.module.attend_backward(upstream, tokens, cores, spec, core_bias)
        attend, backward = self._functions(tokens, spec)
        if tokens.q_start:
            # A backend's backward is that of whole sequences.
            backward = query_blocks.attend_backward
        if not fetches:
            shape = (tokens.q.shape[0], 0, spec.fetch_groups)
            nothing = torch.empty(shape, dtype=torch.int32, device=tokens.q.device)
            return backward(upstream, tokens, cores, spec, core_bias, nothing)
        if not self.choices:
            self.choices.append(attend(tokens, cores, spec, core_bias)[2])
        # mutant fetch: the backward has another choice
        choice = self.choices.pop(0)
        return backward(upstream, tokens, cores, spec, core_bias, choice)

    def gradients(
        self,
        upstream: Upstream,
        tokens: Tokens,
        groups: Groups,
        cores: Cores,
        spec: Spec,
        core_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return gradients as `compose.gradients` does; all at once where the backend can."""
        whole = getattr(self.module, "fetch_gradients", None)
        if whole is not None and self.choices and _fetches(cores, spec):
            grads = whole(upstream, tokens, groups, cores, spec, core_bias, self.choices[0])
            if grads is not None:
                self.choices.pop(0)
                return grads
        return compose.gradients(self, upstream, tokens, groups, cores, spec, core_bias)

    def _functions(self, tokens: Tokens, spec: Spec) -> tuple[Callable[..., Any], ...]:
        """The forward and the backward that take the call."""
        reason = getattr(self.module, "fetch_unsupported_reason", None)
        if reason is not None and reason(spec, tokens) is None:
            return self.module.fetch_attend, self.module.fetch_attend_backward
        return query_blocks.attend, query_blocks.attend_backward


def _fetches(cores: Cores, spec: Spec) -> bool:
    """Whether the sequence has groups to fetch."""
    return spec.fetch_groups > 0 and cores.k.shape[2] > 0
