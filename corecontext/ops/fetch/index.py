"""Score groups by an index of their raw keys: build its tensors, count its bytes, estimate each
group's share of a query's softmax.

A score estimates the log of the group's mass, log sum_o exp(score of token o), so that scores of
several query heads and of raw tokens can be compared. The index "core" has no tensors: its score is
that of the core token, with bias and mass.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext.config import parse_index
from corecontext.ops.fetch import core_part, low_bits
from corecontext.ops.fetch.core_part import cap, products
from corecontext.ops.pooling import widen
from corecontext.ops.spec import Cores, Spec


class Index(NamedTuple):
    """Hold the stored tensors of an index, each [N, M, ...]."""

    name: str
    """One of `config.FETCH_INDICES`."""
    group_size: int
    """Tokens of a group: g."""
    tensors: tuple[Tensor, ...]
    """"mean": keys [N, M, D]. "bounds": least and largest, [N, M, D] each. "parts:P" and "oracle":
    keys [N, M, P, D]. "bits:B": codes [N, M, g, D B / 8], scales [N, M, g]. "core": none."""

    def first(self, count: int) -> Index:
        """Return the index of the first `count` groups."""
        return self._replace(tensors=tuple(x[:, :count] for x in self.tensors))

    def sequences(self, rows: slice) -> Index:
        """Return the index of some of the N sequences."""
        return self._replace(tensors=tuple(x[rows] for x in self.tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors)


def index_bytes(name: str, group_size: int, head_dim: int, itemsize: int) -> int:
    """Count the bytes that an index stores for a group and KV head, keys having `itemsize` bytes an
    element; those of "oracle" are the raw keys themselves."""
    kind, number = parse_index(name)
    if kind == "bits":
        return group_size * low_bits.num_bytes(number, head_dim)
    keys = {"core": 0, "mean": 1, "bounds": 2, "parts": min(number, group_size)}
    return keys.get(kind, group_size) * head_dim * itemsize


def keys_per_group(name: str, group_size: int) -> int:
    """Count the scores that a query has with one group under an index."""
    kind, number = parse_index(name)
    return {"parts": min(number, group_size), "oracle": group_size, "bits": group_size}.get(kind, 1)


def build(keys: Tensor, name: str) -> Index:
    """Build an index from the raw keys [N, M, g, D] of groups, rotary applied; its tensors have the
    dtype of the keys, or `low_bits`' own."""
    kind, number = parse_index(name)
    size = keys.shape[2]
    if kind == "core":
        tensors: tuple[Tensor, ...] = ()
    elif kind == "mean":
        tensors = (widen(keys).mean(2).to(keys.dtype),)
    elif kind == "bounds":
        tensors = (keys.amin(2), keys.amax(2))
    elif kind == "parts" and number < size:
        means = [widen(part).mean(2) for part in keys.tensor_split(number, 2)]
        tensors = (torch.stack(means, 2).to(keys.dtype),)
    elif kind == "bits":
        tensors = low_bits.encode(keys, number)
    else:
        tensors = (keys,)
    return Index(name, size, tensors)


def scores(index: Index, q: Tensor, cores: Cores, spec: Spec, core_bias: Tensor | None) -> Tensor:
    """Return the estimated log mass of each group for each query, [N, r, T, M] in float32 or wider.

    Args:
        q: [N, r, T, D].
        cores: Core tokens of the same groups, [N, 1 or r, M, D]; "core" alone reads them.
        core_bias: Added to their scores, [N, r] or [N, r, M], or None.
    """
    kind, number = parse_index(index.name)
    size = index.group_size
    if kind == "core":
        return core_part.scores(q, cores, spec, core_bias)[0]
    if kind == "mean":
        return cap(products(q, index.tensors[0]) * spec.scale, spec) + math.log(size)
    if kind == "bounds":
        least, largest = index.tensors
        bound = products(q.clamp(min=0), largest) + products(q.clamp(max=0), least)
        return cap(bound * spec.scale, spec) + math.log(size)
    if kind == "bits":
        return _low_bit_scores(index, q, spec, number)
    keys = index.tensors[0]
    count = keys.shape[2]
    each = cap(products(q, keys.flatten(1, 2)) * spec.scale, spec).unflatten(3, (-1, count))
    if count < size:
        each = each + part_sizes(size, count, each).log()
    return each.logsumexp(-1)


def part_sizes(group_size: int, count: int, like: Tensor) -> Tensor:
    """Return the tokens of each of `count` parts of a group, [P] in the dtype of `like`: the first
    g mod P parts have one more, as `torch.tensor_split` splits."""
    least, more = divmod(group_size, count)
    number = torch.arange(count, device=like.device)
    return (least + (number < more)).to(like.dtype)


def _low_bit_scores(index: Index, q: Tensor, spec: Spec, bits: int) -> Tensor:
    """Log mass of the tokens as stored."""
    codes, scales = index.tensors
    dim = q.shape[3]
    rotated = q @ low_bits.rotation(dim, q.dtype, q.device)
    keys = low_bits.decode(codes, bits, dim, q.dtype).flatten(1, 2)
    each = products(rotated, keys)
    each = each * (scales.to(each.dtype) * spec.scale).flatten(1, 2)[:, None, None]
    return cap(each, spec).unflatten(3, (-1, index.group_size)).logsumexp(-1)
