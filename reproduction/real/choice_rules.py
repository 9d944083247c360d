"""Choose the groups of queries by other rules than the package's, and count them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from corecontext.files import UserError
from corecontext.ops.fetch import attend as fetch
from corecontext.ops.fetch.choice import Choice, choose, to_marks
from corecontext.ops.fetch.core_part import cap
from corecontext.ops.fetch.index import products
from corecontext.ops.fetch.mean import Mean
from corecontext.ops.fetch.scoring import Queries, centre_of, group_keys, key_scores, scores
from corecontext.ops.spec import Cores, Spec, Tokens
from corecontext.visibility import (
    first_core_query,
    local_start,
    num_visible_cores,
    sees_core,
    sees_token,
)

ELEMENTS = 1 << 27
"""Most scores of keys at once."""


class Block(NamedTuple):
    """Hold queries of all KV heads, and the groups that they may choose from."""

    tokens: Tokens
    """The queries [N, r, T, D], and raw tokens from position 0 on."""
    positions: Tensor
    """Of the queries, [T]."""
    keys: Tensor
    """Scores of the index's keys of the groups, [N, r, T, M, P]."""
    visible: Tensor
    """[T, M], True where a query sees the group."""
    spec: Spec
    kv_heads: int
    """Of a layer: N is rows x KV heads."""

    def choose(self, values: Tensor, allowed: Tensor | bool = True) -> Tensor:
        """Return the k groups that each query sees with the largest value of a query head,
        [N, T, k], of values [N, r, T, M].

        Args:
            allowed: False where a group is left out, [N, 1, T, M].
        """
        return choose(values, self.visible & allowed, self.spec.fetch_groups)

    def of_rows(self, values: Tensor) -> Tensor:
        """Return values [N, r, T, M] with all query heads of a row together, [rows, H, T, M]."""
        return values.unflatten(0, (-1, self.kv_heads)).flatten(1, 2)

    def shares(self) -> Tensor:
        """Return the share of each group in the softmax of full attention, [N, r, T, M]: groups by
        the index's keys, sinks and the window by raw keys."""
        spec = self.spec
        g, window, sinks = spec.group_size, spec.window_size, spec.sinks
        q, k = self.tokens[:2]
        raw = torch.arange(k.shape[1], device=k.device)
        raw = raw[(raw < sinks) | (raw >= local_start(self.tokens.q_start, g, window))]
        seen = sees_token(raw, self.positions[:, None], g, window, sinks)
        near = cap(products(q, k[:, raw]) * spec.scale, spec).masked_fill(~seen, -torch.inf)
        far = cap(self.keys, spec).logsumexp(-1).masked_fill(~self.visible, -torch.inf)
        return (far - torch.cat((far, near), -1).logsumexp(-1, keepdim=True)).exp()


def _per_head(block: Block) -> Tensor:
    """Return the package's choice: of each KV head, by its largest score."""
    return block.choose(block.keys.amax(-1))


def _one_a_layer(block: Block) -> Tensor:
    """Return one choice for all KV heads of a layer, by the sum of shares over all query heads."""
    of_row = block.of_rows(block.shares()).sum(1, keepdim=True)
    return block.choose(of_row).repeat_interleave(block.kv_heads, 0)


def _largest_a_layer(block: Block) -> Tensor:
    """Return one choice for all KV heads of a layer, by the largest score of any query head."""
    of_row = block.of_rows(block.keys.amax(-1))
    return block.choose(of_row).repeat_interleave(block.kv_heads, 0)


def _adaptive(block: Block, threshold: float) -> Tensor:
    """Return the package's choice without the groups whose share is below a threshold for each
    query head."""
    weighs = block.shares().amax(1, keepdim=True) >= threshold
    return block.choose(block.keys.amax(-1), weighs)


def _two_levels(block: Block, candidates: float) -> Tensor:
    """Return the package's choice among so many groups whose mean keys have the largest score."""
    spec = block.spec.replace(fetch_index=Mean())
    count = block.visible.shape[1]
    means = spec.index.encode(group_keys(block.tokens.k, spec, count), None)
    by_mean = scores(means, Queries.of(block.tokens.q, spec.index, None), spec)
    left = to_marks(choose(by_mean, block.visible, int(candidates)), count)
    return block.choose(block.keys.amax(-1), left[:, None])


METHODS: dict[str, Callable[..., Tensor]] = {
    "per_head": _per_head,
    "one_a_layer": _one_a_layer,
    "largest_a_layer": _largest_a_layer,
    "adaptive": _adaptive,
    "two_levels": _two_levels,
}
"""Each returns the numbers of groups, [N, T, k], rising, then -1."""
SETTINGS = {"adaptive": "threshold", "two_levels": "candidates"}
"""The setting that a method has beside k."""
FORMS = (
    "per_head:K, one_a_layer:K, largest_a_layer:K, adaptive:K:THRESHOLD or two_levels:K:CANDIDATES"
)


class Rule(NamedTuple):
    """Hold a method and its settings."""

    method: str
    fetch_groups: int
    """Groups that a query fetches, or fetches at most: k."""
    setting: float | None = None

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Return the rule of a text in one of FORMS.

        Raises:
            UserError: the text has another form, or candidates are fewer than k.
        """
        match = re.fullmatch(r"(\w+):([1-9]\d*)(?::(\d+(?:\.\d+)?))?", text)
        method, k, setting = match.groups() if match else ("", "0", None)
        rule = cls(method, int(k), None if setting is None else float(setting))
        is_whole = method in METHODS and (setting is None) == (method not in SETTINGS)
        if not is_whole or rule.params().get("candidates", rule.fetch_groups) < rule.fetch_groups:
            raise UserError(f"choice must be {FORMS} with CANDIDATES of at least K, got {text!r}.")
        return rule

    def params(self) -> dict[str, Any]:
        """Return the settings by their names, as of a record."""
        named = {SETTINGS[self.method]: self.setting} if self.method in SETTINGS else {}
        return {"method": self.method, "fetch_groups": self.fetch_groups, **named}


def blocks_of(
    tokens: Tokens, num_groups: int, spec: Spec, kv_heads: int, share: int = 1
) -> Iterator[Block]:
    """Yield the queries of a sequence in blocks, from the first one on that sees a group, or from
    the first one of its share; only the last block may end within a share.

    Args:
        tokens: Raw tokens are from position 0 on.
    """
    n, heads, length = tokens.q.shape[:3]
    centre = centre_of(tokens.k, spec)
    stored = spec.index.encode(group_keys(tokens.k, spec, num_groups), centre)
    keys = spec.index.num_keys(spec.group_size)
    size = share * max(1, ELEMENTS // (n * heads * num_groups * keys * share))
    first = spec.sinks + first_core_query(spec.group_size, spec.window_size)
    first = max(first, tokens.q_start)
    if first >= tokens.q_start + length:
        return
    start = first - first % share - tokens.q_start
    while start < length:
        begin, start = max(0, start), start + size
        queries = tokens.after(begin).until(min(start, length) - begin)
        yield _block(queries, stored, centre, spec, kv_heads)


def _block(
    tokens: Tokens, stored: tuple[Tensor, ...], centre: Tensor | None, spec: Spec, kv_heads: int
) -> Block:
    """Return queries with their scores of the groups that the last of them sees."""
    g, window = spec.group_size, spec.window_size
    end = tokens.q_start + tokens.q.shape[2]
    first = spec.sinks // g
    count = num_visible_cores(end - 1, g, window) - first
    positions = torch.arange(tokens.q_start, end, device=tokens.q.device)
    groups = torch.arange(first, first + count, device=tokens.q.device)
    visible = sees_core(groups, positions[:, None], g, window)
    queries = Queries.of(tokens.q, spec.index, centre)
    scored = key_scores(tuple(x[:, :count] for x in stored), queries, spec)
    return Block(tokens, positions, scored, visible, spec, kv_heads)


@contextmanager
def chosen_by(choose: Callable[[Tokens, int, Spec], Choice | None]) -> Iterator[None]:
    """Choose in place of the package, on every backend, for the length of a with block.

    Args:
        choose: Takes arguments as of `query_blocks.choose`; where it returns None, the package
            chooses.
    """
    attend = fetch.attend

    def attend_chosen(
        backend: ModuleType,
        tokens: Tokens,
        cores: Cores,
        spec: Spec,
        mass: Tensor | None = None,
        choice: Choice | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Choice | None]:
        num_groups = cores.k.shape[2]
        if spec.fetch_groups and num_groups:
            choice = choose(tokens, num_groups, spec) or choice
        return attend(backend, tokens, cores, spec, mass, choice, out)

    with mock.patch.object(fetch, "attend", attend_chosen):
        yield


class Chooser:
    """Choose the groups of whole sequences by a rule, and count those of their second halves.

    Args:
        kv_heads: Of a layer.
    """

    def __init__(self, rule: Rule, kv_heads: int) -> None:
        self.rule = rule
        self.kv_heads = kv_heads
        self._num_groups: Tensor | int = 0
        self._num_choices = 0

    def choose(self, tokens: Tokens, num_groups: int, spec: Spec) -> Choice:
        """Return the choice of each query; arguments as of `query_blocks.choose`."""
        n, _, length = tokens.q.shape[:3]
        settings = [] if self.rule.setting is None else [self.rule.setting]
        shape = (n, length, spec.fetch_groups)
        groups = torch.full(shape, -1, dtype=torch.int32, device=tokens.q.device)
        for block in blocks_of(tokens, num_groups, spec, self.kv_heads):
            at = block.positions - tokens.q_start
            groups[:, at] = METHODS[self.rule.method](block, *settings)
        far = groups[:, length // 2 :]
        self._num_groups = self._num_groups + (far >= 0).sum()
        self._num_choices += far.shape[0] * far.shape[1]
        return Choice(groups, 1)

    @property
    def mean_groups(self) -> float:
        """Groups that a query and KV head read on average in second halves of texts.

        Raises:
            UserError: no query had to choose.
        """
        if not self._num_choices:
            raise UserError(
                f"length must have more groups than K, got K = {self.rule.fetch_groups}. "
                "Use a larger --length."
            )
        return float(self._num_groups) / self._num_choices

    def enabled(self) -> AbstractContextManager[None]:
        """Choose in place of the package, as `chosen_by`."""
        return chosen_by(self.choose)
