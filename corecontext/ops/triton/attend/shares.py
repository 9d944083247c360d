"""Say which groups a share of queries may choose.

A share is the queries at positions a n to a n + n - 1 for some a. Groups that may be chosen are
numbered from the first one behind the sinks.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from corecontext.ops.triton.launch import ceil_div
from corecontext.ops.triton.primitives import visible_cores
from corecontext.visibility import num_visible_cores


class Choosing(NamedTuple):
    """Hold the settings of a choice."""

    rule: tuple[int, int, int]
    """group_size, window_size and the number of groups that are sinks."""
    scale: float
    """Factor of index scores."""
    num_chosen: int
    """Groups that a share chooses (k)."""
    share: int
    """Neighbouring queries that choose together (n)."""
    q_start: int
    """Position of the first query."""
    q_end: int
    """Position behind the last query."""

    @property
    def first_share(self) -> int:
        """Number of the first query's share, counted from position 0."""
        return self.q_start // self.share

    @property
    def num_shares(self) -> int:
        """Shares that the queries touch (C)."""
        return ceil_div(self.q_end, self.share) - self.first_share

    def visible_groups(self, share: int, num_groups: int) -> int:
        """Return how many of num_groups groups share number `share` of the call sees."""
        group_size, window_size, sink_groups = self.rule
        last = min((self.first_share + share + 1) * self.share, self.q_end) - 1
        groups = num_visible_cores(last, group_size, window_size) - sink_groups
        return max(0, min(groups, num_groups))


@triton.jit
def groups_seen(position, rule, num_groups):
    """Return how many groups that may be chosen the query at `position` sees; any shape."""
    group_size, window_size, sink_groups = rule
    groups = visible_cores(position, group_size, window_size)
    return tl.minimum(tl.maximum(groups - sink_groups, 0), num_groups)


@triton.jit
def groups_of_share(number, shares, rule, num_groups):
    """Return how many groups the last query of a share sees; any shape.

    Args:
        number: Of the share, from the first share of the call.
        shares: Number of that first share, queries of a share, position behind the last query.
    """
    first_share, share, q_end = shares
    last = tl.minimum((first_share + number + 1) * share, q_end) - 1
    return groups_seen(last, rule, num_groups)
