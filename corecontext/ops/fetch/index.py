"""Score groups by an index of their raw keys: build its tensors, count its bytes, estimate each
group's share of a query's softmax.

A score estimates the log of the group's mass, log sum_o exp(score of token o), so that scores of
several query heads can be compared.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from corecontext import fetch_sizes
from corecontext.config import parse_index
from corecontext.fetch_sizes import num_parts
from corecontext.ops.fetch import low_bits
from corecontext.ops.fetch.core_part import cap, products
from corecontext.ops.pooling import widen
from corecontext.ops.spec import Spec


class Index(NamedTuple):
    """Hold the stored tensors of an index, each [N, M, ...]."""

    name: str
    """One of `config.FETCH_INDICES`."""
    group_size: int
    """Tokens of a group: g."""
    tensors: tuple[Tensor, ...]
    """"mean": keys [N, M, D]. "oracle": keys [N, M, g, D]. In B bits: codes [N, M, P, D B / 8],
    then scales, [N, M, g] of "bits" and [N, M] of the others."""
    centre: Tensor | None = None
    """Subtracted from keys before they are stored in low bits, [N, D]."""

    def first(self, count: int) -> Index:
        """Return the index of the first `count` groups."""
        return self._replace(tensors=tuple(x[:, :count] for x in self.tensors))

    def sequences(self, rows: slice) -> Index:
        """Return the index of some of the N sequences."""
        centre = None if self.centre is None else self.centre[rows]
        return self._replace(tensors=tuple(x[rows] for x in self.tensors), centre=centre)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors by group."""
        return sum(x.numel() * x.element_size() for x in self.tensors)


def num_centred(spec: Spec) -> int:
    """As `fetch_sizes.num_centred`."""
    return fetch_sizes.num_centred(spec.fetch_index, spec.group_size, spec.window_size)


def centre_of(keys: Tensor, spec: Spec) -> Tensor | None:
    """Return the mean key [N, D], in float32 or wider, that centres an index in low bits, None for
    none, from raw keys [N, S, D] from position 0 on."""
    count = num_centred(spec)
    if not count:
        return None
    return widen(keys[:, spec.sinks : spec.sinks + count]).mean(1)


def build(keys: Tensor, name: str, centre: Tensor | None = None) -> Index:
    """Build an index from the raw keys [N, M, g, D] of groups, rotary applied; its tensors have the
    dtype of the keys, or `low_bits`' own.

    Args:
        centre: From `centre_of`; low bits alone read it.
    """
    kind, _, bits = parse_index(name)
    size = keys.shape[2]
    count = num_parts(name, size)
    if bits:
        means = part_means(widen(keys), count)
        if centre is not None:
            means = means - centre[:, None, None]
        return Index(name, size, low_bits.encode(means, bits, kind != "bits"), centre)
    if kind == "mean":
        return Index(name, size, (widen(keys).mean(2).to(keys.dtype),))
    return Index(name, size, (keys,))


def part_means(keys: Tensor, count: int) -> Tensor:
    """Return the means [N, M, P, D] of `count` parts of consecutive keys [N, M, g, D]."""
    if count == keys.shape[2]:
        return keys
    return torch.stack([part.mean(2) for part in keys.tensor_split(count, 2)], 2)


def scores(index: Index, q: Tensor, spec: Spec) -> Tensor:
    """Return the estimated log mass of each group for each query of q [N, r, T, D], [N, r, T, M] in
    float32 or wider."""
    kind, _, bits = parse_index(index.name)
    size = index.group_size
    if kind == "mean":
        return cap(products(q, index.tensors[0]) * spec.scale, spec) + math.log(size)
    each = _low_bit_products(index, q) if bits else products(q, index.tensors[0].flatten(1, 2))
    count = num_parts(index.name, size)
    each = cap(each * spec.scale, spec).unflatten(3, (-1, count))
    if count < size:
        each = each + part_sizes(size, count, each).log()
    return each.logsumexp(-1)


def part_sizes(group_size: int, count: int, like: Tensor) -> Tensor:
    """Return the tokens of each of `count` parts of a group, [P] in the dtype of `like`: the first
    g mod P parts have one more, as `torch.tensor_split` splits."""
    least, more = divmod(group_size, count)
    number = torch.arange(count, device=like.device)
    return (least + (number < more)).to(like.dtype)


def as_products(index: Index, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries [N, r, T, D] and keys [N, M, P, D], both in the dtype of q, whose products are
    those of an index in low bits, up to that with the centre, which all keys share."""
    bits = parse_index(index.name).bits
    codes, scales = index.tensors
    dim = q.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = low_bits.decode(codes, bits, dim, wide)
    keys = keys * scales.to(wide).view(*scales.shape, *[1] * (4 - scales.dim()))
    return q @ low_bits.rotation(dim, q.dtype, q.device), keys.to(q.dtype)


def _low_bit_products(index: Index, q: Tensor) -> Tensor:
    """Products of queries with the keys as stored, [N, r, T, M P]."""
    bits = parse_index(index.name).bits
    codes, scales = index.tensors
    dim = q.shape[3]
    count = codes.shape[2]
    keys = low_bits.decode(codes, bits, dim, q.dtype).flatten(1, 2)
    each = products(q @ low_bits.rotation(dim, q.dtype, q.device), keys)
    if scales.dim() == 2:
        scales = scales[..., None].expand(-1, -1, count)
    each = each * scales.flatten(1, 2).to(each.dtype)[:, None, None]
    if index.centre is not None:
        each = each + products(q, index.centre[:, None].to(q.dtype))
    return each
