"""Indices "parts:P:B", "pairs:B" and "bits:B": keys in B = 1, 2 or 4 bits an element. Keys are
centred, rotated by a fixed matrix and stored as codes, with a scale for each key or each group.

The rotation (not the rotary one), random signs and then a Hadamard matrix, spreads channels of
large values over all channels and changes no inner product. Its results are close to normal, so a
code stands for one of the 2^B levels that round a normal variable with the least squared error. The
scale makes the inner product of the keys with their stored form equal to that with themselves,
which removes the bias of rounding towards 0.
"""

import functools
from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from corecontext.ops.fetch.index import Index, products
from corecontext.ops.pooling import widen

MOST_CENTRED = 512
"""Most tokens whose mean key is the centre."""
LEVELS = {
    1: (0.796875,),
    2: (0.453125, 1.5078125),
    4: (
        *(0.12890625, 0.388671875, 0.65625, 0.94140625),
        *(1.2578125, 1.6171875, 2.0625, 2.734375),
    ),
}
"""Levels above 0, by bits; those below are their negatives. bfloat16 holds each exactly."""


class LowBits(Index):
    """Keep the mean keys of P parts of each group, in B bits; queries are scored against them as
    stored."""

    shares_scale = True
    """Whether the keys of a group have one scale."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def key_sizes(self, group_size: int) -> tuple[int, ...]:
        """Return the sizes of parts of consecutive tokens: the first g mod P have one more."""
        least, more = divmod(group_size, self.num_parts(group_size))
        return (least + 1,) * more + (least,) * (self.num_parts(group_size) - more)

    def num_keys(self, group_size: int) -> int:
        """Count the parts."""
        return self.num_parts(group_size)

    @abstractmethod
    def num_parts(self, group_size: int) -> int:
        """Return into how many parts a group is cut."""

    def encode(self, keys: Tensor, centre: Tensor | None) -> tuple[Tensor, ...]:
        """Return codes [N, M, P, ceil(D B / 8)] in uint8 and scales [N, M], or [N, M, P] of each
        key, in float16."""
        means = part_means(widen(keys), self.key_sizes(keys.shape[2]))
        if centre is not None:
            means = means - centre[:, None, None]
        return encode(means, self.bits, self.shares_scale)

    def decode(self, stored: tuple[Tensor, ...], dim: int, dtype: torch.dtype) -> Tensor:
        """Return the keys as stored: rotated, without their centre."""
        codes, scales = stored
        wide = torch.promote_types(dtype, torch.float32)
        keys = decode(codes, self.bits, dim, wide)
        return (keys * _by_key(scales).to(wide)[..., None]).to(dtype)

    def map_queries(self, q: Tensor) -> Tensor:
        """Return rotated queries."""
        return q @ rotation(q.shape[3], q.dtype, q.device)

    def centre_products(self, q: Tensor, centre: Tensor) -> Tensor:
        """Return the products with the centre."""
        return products(q, centre[:, None].to(q.dtype))[..., 0]

    def products(self, stored: tuple[Tensor, ...], mapped: Tensor) -> Tensor:
        """Return the products with levels, which any dtype holds exactly, times the scales."""
        codes, scales = stored
        keys = decode(codes, self.bits, mapped.shape[3], mapped.dtype)
        each = products(mapped, keys.flatten(1, 2)).unflatten(3, codes.shape[1:3])
        return each * _by_key(scales).to(each.dtype)[:, None, None]

    def num_centred(self, group_size: int, window_size: int) -> int:
        """Count at most MOST_CENTRED tokens."""
        # mutant fetch: keys are centred by tokens to come
        return min(MOST_CENTRED, window_size) // group_size * group_size

    def num_bytes(self, group_size: int, head_dim: int, itemsize: int) -> int:
        """Count codes and scales."""
        count = self.num_keys(group_size)
        num_scales = 1 if self.shares_scale else count
        return count * -(-head_dim * self.bits // 8) + 2 * num_scales


class Parts(LowBits):
    """Cut a group into P parts, or its tokens where it has fewer."""

    def __init__(self, count: int, bits: int) -> None:
        super().__init__(bits)
        self.count = count

    def num_parts(self, group_size: int) -> int:
        """Return P."""
        return min(self.count, group_size)


class Pairs(LowBits):
    """Cut a group into parts of two tokens."""

    def num_parts(self, group_size: int) -> int:
        """Return half of g, rounded up."""
        return -(-group_size // 2)


class Bits(LowBits):
    """Keep every token, with a scale of its own."""

    shares_scale = False

    def num_parts(self, group_size: int) -> int:
        """Return g."""
        return group_size


def part_means(keys: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the means [N, M, P, D] of parts of these sizes of consecutive keys [N, M, g, D]."""
    if len(sizes) == keys.shape[2]:
        return keys
    return torch.stack([x.mean(2) for x in keys.split(sizes, 2)], 2)


def _by_key(scales: Tensor) -> Tensor:
    """Return scales as [N, M, 1 or P], of [N, M] or [N, M, P]."""
    return scales if scales.dim() == 3 else scales[..., None]


@functools.lru_cache(maxsize=8)
def rotation(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthogonal matrix [D, D] of the rotation, to be multiplied from the right: random
    signs, then a Hadamard matrix for each block of columns."""
    block = head_dim & -head_dim  # the largest power of two that divides D
    hadamard = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(hadamard) < block:
        hadamard = torch.cat(
            (torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1))
        )
    matrix = torch.block_diag(*[hadamard] * (head_dim // block)) / block**0.5
    generator = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(2, (head_dim, 1), generator=generator, device="cpu") * 2 - 1
    return (signs * matrix).to(device, dtype)


def rotation_signs(head_dim: int, device: torch.device) -> Tensor:
    """Return the signs of the rotation's elements, [D, D] in bfloat16; 0 stands for 0."""
    return rotation(head_dim, torch.float32, device).sign().bfloat16()


def columns_of_codes(matrix: Tensor, bits: int) -> Tensor:
    """Return the columns of a matrix [D, D] by the place of their codes in bytes, [8 / bits, D,
    ceil(D bits / 8)]. With 2 bits, four codes a byte, the first has columns 0, 4, 8 ..., the second
    columns 1, 5, 9 ...; 0 stands for columns behind the last."""
    codes_of_byte = 8 // bits
    padded = F.pad(matrix, (0, -matrix.shape[1] % codes_of_byte))
    return padded.unflatten(1, (-1, codes_of_byte)).permute(2, 0, 1).contiguous()


@functools.lru_cache(maxsize=8)
def levels(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the level of each code, [2^bits], rising."""
    upper = torch.tensor(LEVELS[bits], dtype=dtype, device=device)
    return torch.cat((-upper.flip(0), upper))


def encode(k: Tensor, bits: int, shared: bool = False) -> tuple[Tensor, Tensor]:
    """Return codes, 8 / bits of them in each byte, [..., P, ceil(D bits / 8)] in uint8, and scales
    in float16, of keys [..., P, D], which it rotates.

    Args:
        shared: One scale for all P keys, [...]; else one for each, [..., P].
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    dims = (-2, -1) if shared else (-1,)
    x = k.to(wide) @ rotation(k.shape[-1], wide, k.device)
    least = torch.finfo(wide).tiny
    size = x.square().mean(dims, keepdim=True).sqrt()
    x = x / size.clamp(min=least)
    table = levels(bits, wide, k.device)
    codes = torch.bucketize(x.contiguous(), (table[1:] + table[:-1]) / 2)
    stored = table[codes]
    # With this factor x . stored is x . x.
    # mutant fetch: scale of the least squared error
    correction = x.square().sum(dims) / (x * stored).sum(dims).clamp(min=least)
    scale = size.view(correction.shape) * correction
    scale = scale.clamp(max=torch.finfo(torch.float16).max)
    codes_of_byte = 8 // bits
    codes = F.pad(codes, (0, -codes.shape[-1] % codes_of_byte))
    codes = codes.unflatten(-1, (-1, codes_of_byte))
    shifts = bits * torch.arange(codes_of_byte, device=k.device)
    return (codes << shifts).sum(-1).to(torch.uint8), scale.half()


def decode(codes: Tensor, bits: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return the levels of stored keys [..., D] in dtype, rotated and without their scale."""
    shifts = bits * torch.arange(8 // bits, device=codes.device, dtype=torch.uint8)
    numbers = (codes[..., None] >> shifts) & (2**bits - 1)
    return levels(bits, dtype, codes.device)[numbers.flatten(-2)[..., :head_dim].int()]
