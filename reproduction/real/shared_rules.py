"""Choose the groups that neighbouring queries of a prompt share by other rules than the package's,
which takes their mean query."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from corecontext.ops.fetch.choice import Choice, choose, num_shares
from corecontext.ops.spec import Spec, Tokens
from corecontext.visibility import sees_core
from reproduction.real.choice_rules import Block, blocks_of, chosen_by

RULES = {"largest": "amax", "shares": "sum"}
"""By the largest score of any query of a share and any query head of a KV head, of queries that do
not see the group yet, too, as the mean query is of all; or by the sum of their shares of the
softmax. And how numbers of queries become one."""


def shared_choice(rule: str, tokens: Tokens, num_groups: int, spec: Spec) -> Choice:
    """Return the choice of each share of queries by a rule of RULES, among the groups that its last
    query sees; arguments as of `query_blocks.choose`."""
    share = spec.fetch_share
    first = tokens.q_start
    end = first + tokens.q.shape[2]
    count = num_shares(first, end, share)
    empty = 0.0 if RULES[rule] == "sum" else -torch.inf
    shape = (tokens.q.shape[0], count, num_groups)
    values = torch.full(shape, empty, dtype=torch.float32, device=tokens.q.device)
    for block in blocks_of(tokens, num_groups, spec, kv_heads=1, share=share):
        of_queries = _of_queries(rule, block)
        place = (block.positions // share - first // share)[None, :, None].expand_as(of_queries)
        seen = values[:, :, : of_queries.shape[2]]
        seen.scatter_reduce_(1, place, of_queries, RULES[rule])
    shares = torch.arange(count, device=values.device) + first // share
    last = (share * shares + share - 1).clamp(max=end - 1)
    group = torch.arange(num_groups, device=values.device) + spec.sinks // spec.group_size
    visible = sees_core(group, last[:, None], spec.group_size, spec.window_size)
    return Choice(choose(values[:, None], visible, spec.fetch_groups), share)


def _of_queries(rule: str, block: Block) -> Tensor:
    """Return the value of each group for each query of a KV head, [N, T, M] in float32."""
    if rule == "largest":
        return block.keys.amax(-1).amax(1).float()
    return block.shares().sum(1).float()


def sharing_by(rule: str | None) -> AbstractContextManager[None]:
    """Have shared choices made by a rule, as `choice_rules.chosen_by`; None is the package's."""

    def choose_shared(tokens: Tokens, num_groups: int, spec: Spec) -> Choice | None:
        """Choose for neighbours by the rule, and leave other choices to the package."""
        if rule is None or spec.fetch_share == 1:
            return None
        return shared_choice(rule, tokens, num_groups, spec)

    return chosen_by(choose_shared)
